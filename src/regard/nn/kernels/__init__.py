"""What torch has no good kernel for on a GPU, written in Triton, which comes with torch for CUDA only."""
