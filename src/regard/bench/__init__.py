"""``regard bench``: the speed of translation and training, compared with other libraries in the same run."""
