"""Decoding: beam search, greedy search, sampling and mask-predict over token ids.

Decoding is independent of models, texts and files. A step function maps the last tokens and a state to the logits of
the next token; for mask-predict, a function maps a partly masked sequence to the logits of the masked tokens.
"""
