"""Neural networks: tensors of token ids in, tensors out. Nothing here reads files or text.

In the order of "Attention Is All You Need" (Vaswani et al. 2017):

    attention             scaled dot-product attention and masks (section 3.2.1)
    multi_head_attention  several heads in parallel (3.2.2)
    attention_patterns    full and sparse attention: sliding window, Linformer, BigBird
    positions             positional encodings (3.5)
    norms, dropout        normalization and dropout (5.4)
    layers                embeddings (3.4), feed-forward network (3.3), encoder and decoder layers (3.1)
    transformer           the encoder-decoder Transformer (3)
    loss                  label smoothing and the training losses (5.4)

Other networks: ``language_model`` (decoder only), ``encoder_heads`` (encoder only), ``non_autoregressive``,
``lstm``, ``convolution``, and ``ensemble`` of several networks. ``architectures`` lists what a recipe can select;
``triton_kernels`` holds Triton kernels for GPUs.

Every choice that a recipe can name is a class or function here, registered where it is defined (``Registry``).

Shape letters, as in ``Float[Tensor, "B T d"]``:

    B   sentences of a batch                   d    d_model, the width of the model
    R   rows: sentences x beams                dk   width of the queries and keys of a head
    S   source length                          dv   width of the values of a head
    T   target length, or any length           h    query heads
    Q   number of queries                      g    key-value heads; h / g query heads share one
    K   number of keys                         V    vocabulary size, or number of labels
    L   layers                                 #B   B or 1 (broadcast)
    n   blocks of a sequence                   P    positions that get a label

``non_pad`` is a boolean tensor, True at tokens that are not padding; None means that there is no padding.
"""
