"""Fused Triton kernels of the decode step, each with a plain counterpart in torch or transformers."""
