"""What a recipe asks for that is not part of a plain installation. Imports nothing of it."""

from __future__ import annotations

from importlib.util import find_spec

from understudy.config import Recipe

_MATH = "understudy.rollout.rewards.math_reward:math_verify"


def missing_extras(recipe: Recipe) -> list[str]:
    """What the recipe asks for and this machine lacks; looks without importing."""
    asks = [
        (recipe.cluster.backend == "ray", "cluster.backend = 'ray'", "ray", "ray"),
        (
            recipe.dataplane.backend == "transfer_queue",
            "dataplane.backend = 'transfer_queue'",
            "transfer_queue",
            "ray",
        ),
        (recipe.student.lora is not None, "[student.lora]", "peft", "lora"),
        (recipe.data.reward == _MATH, f"data.reward = {_MATH!r}", "math_verify", "math"),
    ]
    return [
        f"{key} needs the {extra} extra: pip install understudy[{extra}]"
        for asked, key, module, extra in asks
        if asked and find_spec(module) is None
    ]
