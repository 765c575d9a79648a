"""From files of text to batches of numbers: corpus, tokenizer, store, batches, in that order."""
