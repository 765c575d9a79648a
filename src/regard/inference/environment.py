"""Environment variables of the native libraries. A program sets them before its first use of torch; imports do not."""

import os


def limit_onednn_cache() -> None:
    """Limit the number of kernels that oneDNN caches, unless the user has set it.

    oneDNN compiles a kernel for each shape and caches about a thousand of them, twice: 0.8 GB, however small the model.
    Sentences that end one by one give a new shape in every step; shapes that recur do so soon. The variables are read
    when the first kernel is made.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
