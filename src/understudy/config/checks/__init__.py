"""What one section of a recipe cannot see alone: keys that contradict each other or do nothing."""
