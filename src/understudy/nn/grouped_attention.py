"""Causal attention over packed rows with cuDNN's kernels, one group of equally long rows at a time.

On Hopper and later, cuDNN is about twice as fast as FlashAttention 2, which torch uses for rows of
different lengths. But torch plans a cuDNN call for every new shape (some 40 ms, cached per thread). So rows
are padded to multiples of `ROUND`, rows of equal length are adjacent, and a group has 1, 2, 3, 4, 6, 8, 12,
… rows. This keeps the number of shapes small. No token attends to the padding.

The compiler sees one operator and not the lengths: otherwise it would compile a layer again for each list
of lengths.

Legend: T packed tokens, H query heads, K key/value heads (H is a multiple of K), D head size, G groups.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ROUND = 64
MOST_GROUPS = 64
WORTH_ROUNDING = 1.04
"""Largest ratio of padded to real tokens."""
MAX_HEAD = 128
HOPPER = 9
"""Lowest compute capability at which cuDNN's attention is faster."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The layout of padded rows: grouped by length, longest first."""

    order_B: np.ndarray
    """The rows in layout order."""
    filled_B: np.ndarray
    """The padded length of each row."""
    begins_B: np.ndarray
    table_G3: np.ndarray
    """int64 [MOST_GROUPS, 3]: (first token, rows, tokens per row), then zeros up to a constant shape."""

    @property
    def total(self) -> int:
        return int(self.filled_B.sum())

    @property
    def bounds(self) -> np.ndarray:
        """int32 [B + 1]: the boundaries of the rows in layout order."""
        return np.concatenate([[0], np.cumsum(self.filled_B[self.order_B])]).astype(np.int32)


NO_GROUPS = torch.zeros(MOST_GROUPS, 3, dtype=torch.int64)


def rounded_lengths(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // ROUND) * ROUND


def in_groups(lengths_B: np.ndarray) -> Groups | None:
    """The layout of rows; None if padding costs more than cuDNN saves, or too many lengths differ."""
    filled_B = rounded_lengths(lengths_B.astype(np.int64))
    if filled_B.sum() > WORTH_ROUNDING * lengths_B.sum():
        return None
    order_B = np.argsort(-filled_B, kind="stable")
    found = list(_groups(filled_B[order_B].tolist()))
    if len(found) > MOST_GROUPS:
        return None
    table_G3 = np.zeros((MOST_GROUPS, 3), dtype=np.int64)
    table_G3[: len(found)] = found
    begins_B = np.zeros_like(filled_B)
    begins_B[order_B] = np.cumsum(filled_B[order_B]) - filled_B[order_B]
    return Groups(order_B, filled_B, begins_B, table_G3)


def _groups(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    at = first = 0
    while first < len(lengths):
        length, last = lengths[first], first
        while last < len(lengths) and lengths[last] == length:
            last += 1
        left = last - first
        while left:
            count = _few_shapes(left)
            yield at, count, length
            at += count * length
            left -= count
        first = last


def _few_shapes(count: int) -> int:
    """The largest of 1, 2, 3, 4, 6, 8, 12, … that is at most `count`."""
    power = 1 << (count.bit_length() - 1)
    return power + power // 2 if power > 1 and count >= power + power // 2 else power


@torch.library.custom_op("understudy::grouped_attention", mutates_args=())
def grouped_attention(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    groups_G3: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    learns: bool,
) -> tuple[Tensor, Tensor]:
    """Returns ([T, H, D], log-sum-exps for the backward pass: float32 [T · H] if it `learns`, else empty).

    Each row attends to itself only. If `groups_G3` (on the host) has no group, FlashAttention computes the
    rows given by `bounds`; the compiler does not see which of the two runs.
    """
    parts, sums = [], []
    if _left_to_flash(groups_G3, query_THD):
        mixed_THD, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            query_THD, key_TKD, value_TKD, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
        )
        return mixed_THD.contiguous(), logsumexp.flatten() if learns else logsumexp.new_empty(0)
    for rows in _rows_of(groups_G3, bounds):
        query, key, value = (rows.beside(x) for x in (query_THD, key_TKD, value_TKD))
        if query.is_cuda:
            mixed, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, learns, 0.0, True, False, scale=scale
            )
        else:
            mixed, logsumexp = _plain(query, key, value, scale)
        parts.append(mixed)
        sums += [logsumexp.flatten()] if learns else []
    empty = query_THD.new_empty(0, dtype=torch.float32)
    return _in_line(parts), torch.cat(sums) if learns else empty


@grouped_attention.register_fake
def _(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    groups_G3: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    learns: bool,
) -> tuple[Tensor, Tensor]:
    size = query_THD.shape[0] * query_THD.shape[1] if learns else 0
    return query_THD.new_empty(query_THD.shape), query_THD.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("understudy::grouped_attention_backward", mutates_args=())
def _slopes(
    slope_THD: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    mixed_THD: Tensor,
    sums: Tensor,
    groups_G3: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a change of queries, keys and values does."""
    slope_THD = slope_THD.contiguous()
    # Where a dropout would keep its seed; there is none.
    unused = torch.zeros(2, dtype=torch.int64, device=query_THD.device)
    if _left_to_flash(groups_G3, query_THD):
        slopes = torch.ops.aten._flash_attention_backward(
            slope_THD, query_THD, key_TKD, value_TKD, mixed_THD, sums.view(query_THD.shape[1], -1),
            bounds, bounds, longest, longest, 0.0, True, unused, unused, scale=scale,
        )  # fmt: skip
        of_query, of_key, of_value = (one.contiguous() for one in slopes)
        return of_query, of_key, of_value
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in _rows_of(groups_G3, bounds):
        slope, query, key, value, mixed = (
            rows.beside(x) for x in (slope_THD, query_THD, key_TKD, value_TKD, mixed_THD)
        )
        if slope.is_cuda:
            own_sums = rows.sums_in(sums, query.shape[1])
            found.append(
                torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                    slope, query, key, value, mixed, own_sums, unused[0], unused[1], None, None, None,
                    rows.length, rows.length, 0.0, True, scale=scale,
                )
            )  # fmt: skip
        else:
            found.append(_plain_slopes(slope, query, key, value, scale))
    of_query, of_key, of_value = (_in_line(parts) for parts in zip(*found, strict=True))
    return of_query, of_key, of_value


@_slopes.register_fake
def _(
    slope_THD: Tensor, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query_THD.new_empty(query_THD.shape),
        key_TKD.new_empty(key_TKD.shape),
        value_TKD.new_empty(value_TKD.shape),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, longest, scale, learns = inputs
    if not learns:
        raise RuntimeError("grouped_attention was called with learns=False, and a gradient is asked for")
    ctx.save_for_backward(*tensors, *output)
    ctx.longest, ctx.scale = longest, scale


def _backward(ctx: Any, slope_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query_THD, key_TKD, value_TKD, groups_G3, bounds, mixed_THD, sums = ctx.saved_tensors
    slopes = _slopes(
        slope_THD, query_THD, key_TKD, value_TKD, mixed_THD, sums, groups_G3, bounds, ctx.longest, ctx.scale
    )
    return (*slopes, None, None, None, None, None)


grouped_attention.register_autograd(_backward, setup_context=_remember)


class _Rows:
    """Adjacent rows of one length."""

    def __init__(self, first: int, count: int, length: int) -> None:
        self.first, self.count, self.length = first, count, length

    def beside(self, x_TXD: Tensor) -> Tensor:
        """A view of these rows as [rows, X, length, D]."""
        part = x_TXD[self.first : self.first + self.count * self.length]
        return part.view(self.count, self.length, *x_TXD.shape[1:]).transpose(1, 2)

    def sums_in(self, sums: Tensor, heads: int) -> Tensor:
        part = sums[heads * self.first : heads * (self.first + self.count * self.length)]
        return part.view(self.count, heads, self.length, 1)


def _left_to_flash(groups_G3: Tensor, query_THD: Tensor) -> bool:
    return query_THD.is_cuda and not int(groups_G3[0, 1])


def _rows_of(groups_G3: Tensor, bounds: Tensor) -> Iterator[_Rows]:
    table = groups_G3[groups_G3[:, 1] > 0].tolist()
    if not table:
        table = [(first, 1, end - first) for first, end in pairwise(bounds.tolist())]
    yield from (_Rows(*one) for one in table)


def _in_line(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates groups [rows, X, length, D] to packed rows [T, X, D]."""
    lines = [part.transpose(1, 2).reshape(-1, part.shape[1], part.shape[3]) for part in parts]
    return torch.cat(lines) if len(lines) > 1 else lines[0].contiguous()


def _weights(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(softmax, its log-sum-exps), the softmax as [rows, K, query heads per key head, length, length]."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = grouped @ key[:, :, None].transpose(-1, -2) * scale
    length = query.shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same as cuDNN in plain torch: for a CPU, and as a reference."""
    weights, sums = _weights(query, key, scale)
    return (weights @ value[:, :, None]).flatten(1, 2), sums.flatten(1, 2).float()


def _plain_slopes(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    weights, _ = _weights(query, key, scale)
    slope, query = (x.unflatten(1, (key.shape[1], -1)) for x in (slope, query))
    of_weights = slope @ value[:, :, None].transpose(-1, -2)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
    of_query = (of_scores @ key[:, :, None]).flatten(1, 2)
    of_key = (of_scores.transpose(-1, -2) @ query).sum(2)
    of_value = (weights.transpose(-1, -2) @ slope).sum(2)
    return of_query, of_key, of_value


def takes_groups(device: torch.device, dtype: torch.dtype, config: Any, *, learns: bool) -> bool:
    """Whether `grouped_attention` supports this model on this device and agrees with FlashAttention.

    Gradients are compared too if it `learns`.
    """
    # cuDNN sums gradients in any order, whatever torch's setting; FlashAttention has a deterministic mode.
    if learns and torch.are_deterministic_algorithms_enabled():
        return False
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1)
    if not heads or not 0 < size <= MAX_HEAD or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return False
    return _agrees(device, dtype, heads, key_heads, int(size), learns)


@functools.cache
def _agrees(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int, learns: bool
) -> bool:
    """Compares once per process."""
    try:
        _compare_with_flash(device, dtype, (heads, key_heads, size), learns)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # this cuDNN lacks the shape: FlashAttention is used instead
        logger.warning("cuDNN's attention is not used on %s: %s", device, error)
        return False
    return True


def _compare_with_flash(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], learns: bool
) -> None:
    heads, key_heads, size = shape
    generator = torch.Generator(device).manual_seed(0)
    groups = in_groups(np.array([192, 128, 128]))
    assert groups is not None
    ends = torch.from_numpy(groups.bounds).to(device)
    scale = size**-0.5

    def drawn(count: int) -> Tensor:
        return torch.randn(448, count, size, device=device, generator=generator).to(dtype)

    parts, slope = [drawn(count) for count in (heads, key_heads, key_heads)], drawn(heads)
    found = []
    with torch.inference_mode(False), torch.set_grad_enabled(learns):
        for ours in (True, False):
            leaves = [part.clone().requires_grad_(learns) for part in parts]
            if ours:
                table_G3 = torch.from_numpy(groups.table_G3)
                mixed, _ = grouped_attention(*leaves, table_G3, ends, 192, scale, learns)
            else:
                mixed = torch.ops.aten._flash_attention_forward(
                    *leaves, ends, ends, 192, 192, 0.0, True, False, scale=scale
                )[0]
            found.append([mixed, *(torch.autograd.grad(mixed, leaves, slope) if learns else ())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=4e-2)
