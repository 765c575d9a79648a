"""The built-in English-German corpus (``corpus``, from ``grammar`` and ``lexicon``), and the demo that trains on it."""
