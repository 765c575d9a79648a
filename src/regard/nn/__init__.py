"""The mathematics, in the paper's order: attention, positions, norms, feed-forward, layers, the Transformer.

No files and no text: tensors and ids in, tensors out. Every choice a recipe can name is one class here and one
entry in the dictionary beside it.
"""
