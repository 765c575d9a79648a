"""The built-in English-German corpus, and the demo that trains on it."""
