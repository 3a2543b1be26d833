"""The frozen model: packing rows, forward pass, scores per token."""
