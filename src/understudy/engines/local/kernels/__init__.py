"""Triton kernels of the decode step, each beside or equal to a plain torch version."""
