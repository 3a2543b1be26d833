"""The critic, in the trainer's process or in its own."""
