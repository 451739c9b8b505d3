"""Lays out arrays: the device mesh, the layout of parameters and batches on it, and multi-host start-up."""
