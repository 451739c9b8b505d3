"""Pallas kernels for attention, for TPUs and GPUs; models/attention.py is their reference."""
