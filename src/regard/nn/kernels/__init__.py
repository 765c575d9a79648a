"""GPU kernels in Triton, where torch has no fast one. Triton comes only with torch for CUDA."""
