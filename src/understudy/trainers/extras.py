"""What a recipe asks for that is not part of a plain installation. Imports nothing of it."""

from __future__ import annotations

from importlib.util import find_spec

from understudy.config import Recipe

_NEEDS = {"ray": "cluster.backend = 'ray'", "transfer_queue": "dataplane.backend = 'transfer_queue'"}
"""Module → what asks for it."""


def missing_extras(recipe: Recipe) -> list[str]:
    """What the recipe asks for and this machine lacks; looks without importing."""
    asked = {"ray"} if recipe.cluster.backend == "ray" else set()
    if recipe.dataplane.backend == "transfer_queue":
        asked.add("transfer_queue")
    return [
        f"{_NEEDS[module]} needs the ray extra: pip install understudy[ray]"
        for module in sorted(asked)
        if find_spec(module) is None
    ]
