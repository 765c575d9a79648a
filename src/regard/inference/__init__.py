"""Inference: the engine, packed networks, quantization, KV cache, worker processes, confidence, hallucinations."""
