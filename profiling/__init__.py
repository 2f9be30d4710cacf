"""Recording, reading and judging profiles of overlapped MoE training."""
