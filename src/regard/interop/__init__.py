"""Conversion of models from and to Hugging Face (MarianMT), CTranslate2, ONNX, torch.nn.Transformer, HTML, and bundles.

base            what each format can represent; tokenizer files, position tables and optional packages
weight_names    the names of our weights in other libraries
verification    every conversion is verified: both models read the same texts and are compared layer by layer
huggingface, ctranslate2, onnx, pytorch, html    one file for each format
convert         the formats by name, and bundles
"""
