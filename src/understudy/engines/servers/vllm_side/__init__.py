"""Code that runs inside vLLM's own environment; this folder is put on its import path."""
