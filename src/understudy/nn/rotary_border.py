"""Finds a model's context, and the length at which its rotary frequencies change, from its configuration; no torch.

transformers chooses these frequencies by the longest position of a whole *batch*:

    longrope    one long row gives every row of the batch the long factors
    dynamic     every length beyond the border has its own frequencies, and those of earlier batches persist

So rows on both sides of the border must not share a forward pass, and a generation must not cross it: keys
cached before the border would have been rotated by other frequencies than the queries after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_BY_LENGTH = ("longrope", "su")
"""`su` is the name of `longrope` in the first Phi-3 files."""

_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def stated_context(key: Callable[[str], Any]) -> int | None:
    """The longest sequence that the model was made for, in tokens; None if its configuration states none. `key` gives
    the value of a key of the configuration, or None."""
    values = (key(name) for name in _CONTEXT)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def rotary_border(config: Mapping[str, Any]) -> int | None:
    """The longest sequence, in tokens, with the model's original frequencies; None if length has no
    influence.

    `config`: the content of config.json, or `to_dict()` of a transformers configuration (of its text part,
    if it has several parts).
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer_type = [value for value in scaling.values() if isinstance(value, Mapping)]
    borders = [_border(one, config) for one in by_layer_type or [scaling]]
    return min((border for border in borders if border is not None), default=None)


def _border(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "yarn" and config.get("model_type") == "phi3":
        kind = "longrope"  # as transformers reads it
    if "dynamic" in kind:
        return int(config["max_position_embeddings"])
    if kind not in _BY_LENGTH:
        return None
    original = config.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings"
    )
    return int(original or config["max_position_embeddings"])


def crossing(what: str, border: int, length: int, *, key: str = "rollout.context_length") -> str:
    """Why sequences of up to `length` tokens are refused, and what to set."""
    return (
        f"{what}: its rotary embedding changes beyond {border} tokens (longrope or dynamic), and sequences may grow to {length}: a "
        f"rollout that crosses would be written with other frequencies than it is trained with; set {key} = {border} or less"
    )
