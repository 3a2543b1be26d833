"""Pictures: stored once per run by the hash of their bytes, checked, and cut into patches for a model."""
