"""From text files to batches of token ids.

``formats`` reads pairs of source and target text out of files, and ``corpus`` divides them into the splits train, valid
and test. ``tokenizer`` learns a vocabulary from the training split and turns text into token ids (``subword_sampling``
does so at random). ``cleaning`` drops unsuitable pairs, ``token_dataset`` stores the ids in a memory-mapped Arrow file,
and ``batching`` plans which rows go into a batch and collates them into tensors. ``quality`` has the rules of ``regard
data check`` and ``regard data clean``, and ``output_formats`` writes pairs. The other modules work on texts at
inference time: ``segmentation`` (words and sentences), ``glossary`` and ``protected_spans``.
"""
