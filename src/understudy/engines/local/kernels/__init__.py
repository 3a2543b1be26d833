"""Fused kernels of the decode step, each beside its plain twin."""
