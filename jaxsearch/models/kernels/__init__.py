"""Pallas kernels for attention, for TPUs and GPUs; the dense functions of models/decoder.py are their reference, and for CPUs."""
