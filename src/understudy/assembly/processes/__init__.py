"""Entry points of the processes a run starts for ranks and the critic."""
