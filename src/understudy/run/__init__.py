"""A run from its first file to its last: launch, restart, resume with a changed recipe, export, replay."""
