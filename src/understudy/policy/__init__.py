"""The student being trained: load, forward, optimizer, checkpoint, export."""
