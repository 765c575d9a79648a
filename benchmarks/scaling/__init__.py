"""The parts of benchmarks/scale.py, one file each."""
