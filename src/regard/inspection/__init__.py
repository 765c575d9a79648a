"""Inspection: traces of single translations, attention, alignment, and the training history of a model."""
