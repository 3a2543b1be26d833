"""The second verb: rows become optimizer steps."""
