"""Send token ids to a running teacher and print or save its scores."""
