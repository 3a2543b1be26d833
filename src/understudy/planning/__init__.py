"""Planning of a run without torch: checks, seats on devices, windows, memory, simulation."""
