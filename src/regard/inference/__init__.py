"""Inference: the engine, packed networks and quantization, the KV cache, worker processes."""
