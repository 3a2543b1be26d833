"""The first verb: prompts become complete rows."""
