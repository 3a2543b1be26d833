"""Update: rows become optimizer steps."""
