"""Processes that run agent loops beside the trainer."""
