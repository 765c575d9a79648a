"""Training: prepare the data, run the training loop, save and average checkpoints, score the result.

``run.py`` trains a run from recipe to card; ``trainer.py`` holds the training loop and ``train_step.py`` one optimizer
step.
"""
