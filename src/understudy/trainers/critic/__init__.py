"""The critic as the trainer sees it: in this process or in one of its own."""
