"""GPU memory that processes need beyond their weights and optimizer states, and settings that fit a GPU."""
