"""The student's forward pass over packed rows."""
