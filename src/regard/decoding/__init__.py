"""Decoding: beam search, greedy search, sampling and mask-predict over token ids.

Nothing here knows a model, a text or a file. A step function maps the last tokens and a state to the logits of the next
token; for mask-predict, a function maps a partly masked sequence to the logits of the masked tokens.
"""
