"""The life of a run: launch, restart, resume with a changed recipe, evaluate, export, replay."""
