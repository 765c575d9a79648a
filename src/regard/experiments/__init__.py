"""Experiments: train variants of a recipe with several seeds, compare them, and check claims about the Transformer.

``experiment_design.py`` says what is trained, ``job_scheduler.py`` and ``job_worker.py`` train it, ``statistics.py``
and ``results.py`` compare the scores, ``figures.py`` and ``report.py`` show them. ``claims.py`` and
``claim_verdicts.py`` are ``regard lab``.
"""
