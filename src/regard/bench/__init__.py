"""``regard bench``: the speed of translation and training, next to other libraries, in one run."""
