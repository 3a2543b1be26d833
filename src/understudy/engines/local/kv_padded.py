"""Keys and values of the tokens seen so far, in buffers that are written in place.

Legend: B rows, H key/value heads, C columns of room, T columns in use, D head size.

transformers' own dynamic cache copies the whole cache for every new token; here room grows by half when it runs out.
All layers hold every column, sliding-window ones too: the model's mask then decides what is visible, and rows can join
and leave.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

FIRST_ROOM = 64
"""Columns for new tokens that are there from the start."""


class RoomyLayer(DynamicLayer):
    """One layer's keys and values, [B, H, C, D], of which the first `used` columns count.

    `room` is how many columns to start with, `most` how many there can ever be.
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
    """For prompts of `width` columns that may grow to `most`; room for all of it would be wasted on most rows."""
    room = min(width + FIRST_ROOM, most)
    return Cache(layers=[RoomyLayer(room, most) for _ in range(layers)])


def keep_rows(cache: Cache, rows_B: Tensor, skip: int) -> None:
    """Keeps only the named rows, and forgets their first `skip` columns (padding in all of them)."""
    for layer in cache.layers:
        layer.keys = layer.keys[rows_B, :, skip:]
        layer.values = layer.values[rows_B, :, skip:]
        layer.used -= skip
        layer.room -= skip
        layer.most -= skip


def merge(first: Cache, second: Cache, most: int) -> Cache:
    """Rows of both, right-aligned on the longer one; the columns before a row's own are unset and must be masked."""
    used = max(first.layers[0].used, second.layers[0].used)
    merged = new_cache(len(first.layers), used, most)
    for layer, upper, lower in zip(merged.layers, first.layers, second.layers, strict=True):
        rows = upper.keys.shape[0] + lower.keys.shape[0]
        shape = (rows, upper.keys.shape[1], layer.room, upper.keys.shape[3])
        # Zeros, not whatever memory held: a masked NaN times a zero weight would still be NaN.
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
