"""Held-out accuracy, and the best checkpoint by it."""
