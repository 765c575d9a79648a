"""From text files to batches of token ids, in the order of the data flow.

    formats/                    read pairs of text out of files, one class per format; write them
    text_files                  open and decode files, here or by URL; lines
    language_identification     the language of a text; language codes in headers and file names
    pairs                       a pair of source and target text, with tags, context or a dependency tree
    corpus                      the splits of a recipe (train, valid, test) as streams of pairs; fingerprints
    tokenizer                   learn a vocabulary, turn text into token ids and back
    subword_sampling            token ids at random (BPE-dropout, subword regularization); augmentation of texts
    cleaning                    drop unsuitable pairs and duplicates
    token_dataset               the token ids of all pairs in one memory-mapped Arrow file
    batching                    plan which rows go into a batch, and collate them into tensors
    prefetch                    produce batches in a thread

``quality`` has the rules of ``regard data check`` and ``regard data clean``; ``quality_report`` shows what they find,
``text_features`` and ``misalignment`` compute what they compare. The other modules work on texts at inference time:
``words``, ``sentence_splitter``, ``glossary``, ``protected_spans`` and ``recasing``.
"""
