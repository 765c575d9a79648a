"""The five ids that stand for no text, with which every vocabulary begins; and the sign for a space."""

PAD = 0
"""fills the short sentences of a batch; never seen by attention, never counted in the loss"""
BOS = 1
"""what the decoder reads first"""
EOS = 2
"""closes every source, and every target; search stops at it"""
UNK = 3
"""a piece of text outside the vocabulary; unigram and bpe spell such text in bytes instead"""
MASK = 4
"""hides a word that is to be guessed from the others"""

SPECIAL_TOKENS = {PAD: "<pad>", BOS: "<s>", EOS: "</s>", UNK: "<unk>", MASK: "<mask>"}

SPACE_SYMBOL = "▁"
"""which SentencePiece has for a space"""
