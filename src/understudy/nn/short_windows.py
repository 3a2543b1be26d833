"""Shortens a model's attention windows for a probe: real windows are longer than any probe.

Some models hand their window to the attention function (Mistral, Gemma 3), others put it into the mask alone (PhiMoE, Llama 4).
Packed attention gets no mask, so of the latter it would compute every token back to the row's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

SHORT = 4
_NAMES = ("sliding_window", "attention_chunk_size")


@contextmanager
def short_windows(model: nn.Module) -> Iterator[bool]:
    """Sets every window in the configs and layers of a model to `SHORT` tokens, and restores them. Yields
    whether there is any; another thread must not use the model meanwhile."""
    holders: dict[int, Any] = {}
    for module in model.modules():
        holders |= {id(one): one for one in (module, getattr(module, "config", None)) if one is not None}
    windows = [
        (holder, name, value)
        for holder in holders.values()
        for name in _NAMES
        if type(value := vars(holder).get(name)) is int and value > SHORT
    ]
    try:
        for holder, name, _ in windows:
            setattr(holder, name, SHORT)
        yield bool(windows)
    finally:
        for holder, name, value in windows:
            setattr(holder, name, value)
