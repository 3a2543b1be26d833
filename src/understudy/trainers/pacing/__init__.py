"""What bounds staleness in the fully async trainer."""
