"""Training over several ranks: sharding, and following rank 0."""
