"""One module per command: `add_arguments` and `run`."""
