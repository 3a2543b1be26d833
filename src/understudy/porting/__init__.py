"""Recipes from the configurations of other projects: verl and TRL. Nothing of theirs is imported or run."""
