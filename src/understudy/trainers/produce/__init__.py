"""Produce: prompts become complete rows."""
