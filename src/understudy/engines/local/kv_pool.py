"""One layer's key/value pool for all rows in flight, in the model's precision or in fp8.

Legend: S slots, H key/value heads, C columns per slot, D head size, N places (a slot and a column each).

In fp8 (e4m3) a head's vector at a place is divided by its **scale**, its largest magnitude / 448, so that
it fills the format's range. The scale is stored beside it in fp32 (3 % of the memory). Three bits of
mantissa remain: the relative error of a number is at most 1/16. This nearly halves the bytes that a decode
step reads, and reading is its bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

NARROW = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST_TOP = 1e-20
"""Lower bound of the largest magnitude, so that a vector of zeros has a scale above 0."""


class KVFormat(StrEnum):
    """The number format of keys and values in a pool."""

    MODEL = "model"
    """In the model's own precision."""
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class KeyValues:
    """One layer's keys and values in slots, with their scales in fp8."""

    keys_SHCD: Tensor
    values_SHCD: Tensor
    key_scales_SHC: Tensor | None = None
    value_scales_SHC: Tensor | None = None
    """fp32; None if keys and values are in the model's precision."""

    @staticmethod
    def empty(
        shape: tuple[int, int, int, int], kv_format: KVFormat, dtype: torch.dtype, device: torch.device
    ) -> KeyValues:
        narrow = kv_format is KVFormat.FP8

        def block() -> Tensor:
            return torch.zeros(shape, dtype=NARROW if narrow else dtype, device=device)

        def scales() -> Tensor | None:
            return torch.zeros(shape[:3], dtype=torch.float32, device=device) if narrow else None

        return KeyValues(block(), block(), scales(), scales())

    def write(self, slots_N: Tensor, columns_N: Tensor, key_NHD: Tensor, value_NHD: Tensor) -> None:
        at = (slots_N, slice(None), columns_N)
        for kept, scales, fresh in (
            (self.keys_SHCD, self.key_scales_SHC, key_NHD),
            (self.values_SHCD, self.value_scales_SHC, value_NHD),
        ):
            if scales is None:
                kept[at] = fresh
                continue
            narrow_NHD, scales_NH = narrowed(fresh)
            # Not every device supports indexed writes of fp8; indexed writes of bytes work everywhere.
            kept.view(torch.uint8)[at] = narrow_NHD.view(torch.uint8)
            scales[at] = scales_NH

    def read(self, slots_N: Tensor, columns_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [N, H, D] at these places."""
        at = (slots_N, slice(None), columns_N)
        if self.key_scales_SHC is None or self.value_scales_SHC is None:
            return self.keys_SHCD[at], self.values_SHCD[at]
        return (
            _widened(self.keys_SHCD.view(torch.uint8)[at], self.key_scales_SHC[at], dtype),
            _widened(self.values_SHCD.view(torch.uint8)[at], self.value_scales_SHC[at], dtype),
        )

    def of_slots(self, slots_B: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, C, D] of whole slots, in fp32."""
        if self.key_scales_SHC is None or self.value_scales_SHC is None:
            return self.keys_SHCD[slots_B].float(), self.values_SHCD[slots_B].float()
        return (
            _widened(self.keys_SHCD.view(torch.uint8)[slots_B], self.key_scales_SHC[slots_B], torch.float32),
            _widened(
                self.values_SHCD.view(torch.uint8)[slots_B], self.value_scales_SHC[slots_B], torch.float32
            ),
        )


def narrowed(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., D] in fp8, and their scales [...]."""
    wide = vectors.float()
    scales = wide.abs().amax(-1).clamp(min=SMALLEST_TOP) / LARGEST
    return (wide / scales[..., None]).to(NARROW), scales


def _widened(bytes_XD: Tensor, scales_X: Tensor, dtype: torch.dtype) -> Tensor:
    return (bytes_XD.view(NARROW).float() * scales_X[..., None]).to(dtype)


def bytes_per_token(heads: int, size: int, kv_format: KVFormat, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in one layer."""
    own = (
        NARROW.itemsize * size + torch.float32.itemsize
        if kv_format is KVFormat.FP8
        else dtype.itemsize * size
    )
    return 2 * heads * own


@dataclass(slots=True)
class Places:
    """Slot and length of each row of a step. The addresses never change: a recorded graph reads them."""

    slots_B: Tensor
    lengths_B: Tensor
    """Tokens in the slot before the step."""
    ends_B: Tensor
    """Tokens in the slot after the step."""
    parts: int = 1
    """Into how many parts attention divides a row (`kernels/attention.py`); fixed when a graph is recorded."""


class SlotLayer(DynamicLayer):
    """One layer's pool as a transformers cache layer.

    `update` writes each row's newest key and value at its place. Attention reads the pool directly.
    """

    def __init__(self, pool: KeyValues) -> None:
        super().__init__()
        self.pool = pool
        self.keys, self.values = pool.keys_SHCD, pool.values_SHCD
        self.is_initialized = True
        self.places: Places | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.places is not None
        places = self.places
        self.pool.write(places.slots_B, places.lengths_B, key_states[:, :, 0], value_states[:, :, 0])
        return self.keys, self.values

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0
