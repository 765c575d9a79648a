"""Files on disk: run folders, atomic writes, and output that can be resumed."""
