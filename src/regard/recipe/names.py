"""The names a choice may take. What is behind a name stands in the dictionary of the module that does
it; a test holds the two lists equal."""

from typing import Literal

Task = Literal["translate", "tag", "classify", "mask", "continue"]
Architecture = Literal["transformer", "decoder", "recurrent", "convolution", "parallel"]
Length = Literal["predicted", "cut"]
"""how a network that says all words at once knows how many they are"""
TokenizerKind = Literal["unigram", "bpe", "characters", "words", "marian"]
Normalization = Literal["nfc", "nfkc", "lower", "none"]
Preset = Literal["tiny", "small", "fast", "base", "big"]
Place = Literal["encoder", "decoder", "memory"]
"""where attention stands: encoder and decoder look at themselves, memory is encoder-decoder attention"""
Score = Literal["scaled", "unscaled", "additive"]
Weighting = Literal["softmax", "relu"]
EncoderPattern = Literal["full", "window", "linformer", "bigbird"]
DecoderPattern = Literal["full", "window"]
MemoryPattern = Literal["full", "linformer"]
Pattern = Literal[EncoderPattern, DecoderPattern, MemoryPattern]
Position = Literal["none", "index", "sinusoidal", "learned", "rotary", "relative", "tree"]
Norm = Literal["layer", "rms", "batch", "none"]
NormPlace = Literal["after", "before"]
Activation = Literal["relu", "gelu", "swish", "swiglu"]
Optimizer = Literal["adam", "adamw", "sgd", "momentum", "adagrad", "rmsprop"]
Schedule = Literal["paper", "constant", "cosine"]
Smoothing = Literal["all", "others"]
Manner = Literal["paper", "transformers", "ctranslate2"]
Batches = Literal["padded", "packed"]
Keep = Literal["placeholders", "numbers"]
"""what passes through a translation untouched"""
Average = Literal["best", "last", "none"]
Device = Literal["auto", "cpu", "cuda"]
LearningPrecision = Literal["auto", "fp32", "bf16"]
Precision = Literal[LearningPrecision, "int8"]
Overlap = Literal["bleu", "bleu_lc", "chrf", "ter", "wer", "per", "rouge1", "rouge2", "rougeL"]
"""measures of texts against texts"""
LabelMeasure = Literal["accuracy", "f1"]
Likelihood = Literal["perplexity", "word_perplexity"]
"""measures that no text shows, only the model itself"""
Measure = Literal[Overlap, LabelMeasure, Likelihood]
