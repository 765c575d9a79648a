"""Special tokens: the first five ids of every vocabulary, which represent no text; and the symbol for a space."""

PAD = 0
"""pads the short rows of a batch; masked in attention and ignored by the loss"""
BOS = 1
"""beginning of sequence: the decoder's first input"""
EOS = 2
"""end of sequence: ends every source and target; decoding stops at it"""
UNK = 3
"""text outside the vocabulary; unigram and bpe use bytes for such text instead"""
MASK = 4
"""replaces a token that is to be predicted"""

SPECIAL_TOKENS = {PAD: "<pad>", BOS: "<s>", EOS: "</s>", UNK: "<unk>", MASK: "<mask>"}

SPACE_SYMBOL = "▁"
"""SentencePiece's symbol for a space"""
