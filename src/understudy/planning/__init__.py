"""What can be known of a run without torch: checks before the start, seats, windows, memory, simulation."""
