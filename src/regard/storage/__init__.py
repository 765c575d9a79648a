"""Files on disk: run folders, atomic writes, output that can be resumed, and prefetching in a thread."""
