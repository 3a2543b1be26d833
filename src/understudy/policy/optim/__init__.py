"""AdamW with master weights, its 8-bit state, the learning-rate schedule, the moving average."""
