"""Saving, loading and exporting the trained state."""
