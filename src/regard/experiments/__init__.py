"""Experiments: train variants of a recipe with several seeds, compare them, and check claims about the Transformer.

``experiment.py`` says what is trained, ``jobs.py`` trains it, ``results.py`` compares the scores, ``report.py`` shows
them. ``claims.py`` and ``claim_verdicts.py`` are ``regard lab``.
"""
