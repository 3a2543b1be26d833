"""The key/value cache of the padded layout: buffers with spare columns, written in place.

Legend: B rows, H key/value heads, C allocated columns, T columns in use, D head size.

transformers' dynamic cache copies the whole cache for every new token. Here a buffer grows by half when it
is full. All layers hold every column, sliding-window layers too. The model's mask decides what is visible,
so rows can join and leave.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

FIRST_ROOM = 64
"""Columns allocated for new tokens from the start."""


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, [B, H, C, D]; the first `used` columns are valid.

    `room` is the number of allocated columns, `most` its upper limit.
    """

    def __init__(self, room: int, most: int) -> None:
        super().__init__()
        self.room, self.most = room, most
        self.used = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = _roomy(key_states, self.room)
        self.values = _roomy(value_states, self.room)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.used = self.used, self.used + key_states.shape[-2]
        if self.used > self.room:
            self.room = min(max(self.used, self.room + self.room // 2), self.most)
            self.keys, self.values = (
                _grown(self.keys, start, self.room),
                _grown(self.values, start, self.room),
            )
        self.keys[:, :, start : self.used] = key_states
        self.values[:, :, start : self.used] = value_states
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.used


def _roomy(states_BHTD: Tensor, room: int) -> Tensor:
    return states_BHTD.new_empty((*states_BHTD.shape[:2], room, states_BHTD.shape[-1]))


def _grown(old_BHTD: Tensor, used: int, room: int) -> Tensor:
    new_BHTD = _roomy(old_BHTD, room)
    new_BHTD[:, :, :used] = old_BHTD[:, :, :used]
    return new_BHTD


def new_cache(layers: int, width: int, most: int) -> Cache:
    """A cache for prompts of `width` columns. It starts small, because few rows grow to `most`."""
    room = min(width + FIRST_ROOM, most)
    return Cache(layers=[GrowingLayer(room, most) for _ in range(layers)])


def keep_rows(cache: Cache, rows_B: Tensor, skip: int) -> None:
    """Keeps only the given rows, and drops their first `skip` columns (padding in all of them)."""
    for layer in cache.layers:
        layer.keys = layer.keys[rows_B, :, skip:]
        layer.values = layer.values[rows_B, :, skip:]
        layer.used -= skip
        layer.room -= skip
        layer.most -= skip


def merge(first: Cache, second: Cache, most: int) -> Cache:
    """The rows of both caches, right-aligned to the longer; columns before a row's own must be masked."""
    used = max(first.layers[0].used, second.layers[0].used)
    merged = new_cache(len(first.layers), used, most)
    for layer, upper, lower in zip(merged.layers, first.layers, second.layers, strict=True):
        rows = upper.keys.shape[0] + lower.keys.shape[0]
        shape = (rows, upper.keys.shape[1], layer.room, upper.keys.shape[3])
        # Zeros, not uninitialised memory: a masked NaN times a zero weight would still be NaN.
        layer.keys, layer.values = (
            upper.keys.new_zeros(shape),
            upper.values.new_zeros((*shape[:3], upper.values.shape[3])),
        )
        layer.dtype, layer.device, layer.is_initialized, layer.used = upper.dtype, upper.device, True, used
        split = upper.keys.shape[0]
        for part, source in ((slice(0, split), upper), (slice(split, rows), lower)):
            start = used - source.used
            layer.keys[part, :, start:used] = source.keys[:, :, : source.used]
            layer.values[part, :, start:used] = source.values[:, :, : source.used]
    return merged
