"""Models come and go: Hugging Face's MarianMT, CTranslate2, ONNX, torch.nn.Transformer, and plain bundles.

needs       packages of other people, asked for when needed
folder      a folder is written whole or not at all
fits        what another format can hold
names       which weight of ours is which of theirs
tokenizers  our vocabularies as files that others can open
proof       both sides read the same texts, and are compared layer by layer
huggingface, ctranslate2, onnx, pytorch, bundle    one for each format
convert     the formats by name
"""
