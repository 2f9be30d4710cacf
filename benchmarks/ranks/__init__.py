"""The parts of `benchmarks/multi_gpu.py`: each is a function of the rank that runs it."""
