"""Checks across sections of a recipe: keys that contradict each other or have no effect."""
