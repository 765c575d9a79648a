"""Conversion of models from and to Hugging Face (MarianMT), CTranslate2, ONNX, torch.nn.Transformer, HTML, and bundles.

base            what each format can represent; names of weights, tokenizer files, position tables and optional packages
verification    every conversion is verified: both models read the same texts and are compared layer by layer
huggingface, ctranslate2, onnx, pytorch, html    one file for each format
convert         the formats by name, and bundles
"""
