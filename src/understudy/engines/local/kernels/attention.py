"""Grouped-query attention of one new token per row over that row's slot of a key/value pool.

Legend: B rows, S slots, Q query heads, H key/value heads (G = Q / H queries share one), C columns per slot,
D head size, P parts of a row.

Only a row's true length is read, and keys and values are not expanded to the query heads: at batch 256 a
step is bound by reading them once. `slot_attention` is the Triton kernel. `slot_attention_plain` is the
same in plain torch: it runs on a CPU, and the kernel must equal it. fp8 numbers are multiplied in fp16,
which represents each of them exactly. The scales of keys are applied to the scores, those of values to the
weights (`kv_pool.py`).

One program per row and key/value head leaves most of a GPU idle if rows are few. If they are long, each row is
therefore divided into parts (`parts_for`), a program for each, and a second kernel joins them. One H200, 2
key/value heads, 4 rows of 32,000 tokens: 479 us, in 16 parts 43 (`benchmarks/one_gpu/split_decode.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from understudy.engines.local.kv_pool import KeyValues

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = None

BLOCK, WARPS = 64, 4
"""Columns read at a time, and the warps of a program."""
NARROW_BLOCK = 32
"""Columns read at a time in fp8, with one warp per 128 of the head size. Converted numbers pass between a
program's warps, and with four warps the kernel takes as long as over twice the bytes (one H200: 101 us,
with one warp 63 us)."""
LONG = 1024
"""Tokens of the longest row from which on rows are divided: below, joining costs what parallel reading saves."""
MOST_PARTS, SHORTEST_PART = 32, 128
"""Parts of a row at most, and columns of a part at least."""


def parts_for(rows: int, heads: int, longest: int, processors: int) -> int:
    """Parts of each row, a power of two: two programs per multiprocessor if rows are few and long."""
    if longest < LONG:
        return 1
    wanted = min(MOST_PARTS, 2 * processors // (rows * heads))
    return 1 << (max(1, wanted).bit_length() - 1)


def slot_attention_plain(
    query_BQD: Tensor,
    pool: KeyValues,
    slots_B: Tensor,
    lengths_B: Tensor,
    scale: float,
    window: int,
    parts: int = 1,
) -> Tensor:
    """[B, Q, D]: softmax(q·k)·v over the first `lengths` columns of each row's slot.

    If `window` > 0, over the last `window` of these columns only. `parts` is for the kernel only.
    """
    rows, queries, size = query_BQD.shape
    keys_BHCD, values_BHCD = pool.of_slots(slots_B)
    heads = keys_BHCD.shape[1]
    grouped_BHGD = query_BQD.view(rows, heads, queries // heads, size).float()
    scores_BHGC = grouped_BHGD @ keys_BHCD.transpose(-1, -2) * scale
    columns_C = torch.arange(keys_BHCD.shape[2], device=query_BQD.device)
    visible_BC = columns_C < lengths_B[:, None]
    if window > 0:
        visible_BC &= columns_C >= lengths_B[:, None] - window
    scores_BHGC = scores_BHGC.masked_fill(~visible_BC[:, None, None], -torch.inf)
    # Unset columns may hold NaN, and 0 · NaN is NaN.
    values_BHCD = values_BHCD.masked_fill(~visible_BC[:, None, :, None], 0.0)
    mixed_BHGD = scores_BHGC.softmax(-1) @ values_BHCD
    return mixed_BHGD.reshape(rows, queries, size).to(query_BQD.dtype)


if triton is not None:

    @triton.jit
    def _division(  # type: ignore[no-untyped-def]
        length, window, PARTS: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr
    ):
        """A row's first visible column, the start of its first block, and the columns of a part.

        They follow from the row's own length, so a row's sums do not depend on the lengths of other rows.
        """
        first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
        begin = first // BLOCK * BLOCK
        share = tl.cdiv(tl.maximum(tl.cdiv(length - begin, PARTS), SHORTEST), BLOCK) * BLOCK
        return first, begin, share

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        query, keys, values, key_scales, value_scales, out, bests, totals, mixes, slots, lengths, scale, window,
        query_row, query_head, key_slot, key_head, key_column, scale_slot, scale_head, out_row, out_head,
        GROUP: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr,
        PARTS: tl.constexpr, SHORTEST: tl.constexpr,
    ):  # fmt: skip
        row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        slot = tl.load(slots + row).to(tl.int64)
        length = tl.load(lengths + row).to(tl.int32)
        first, begin, share = _division(length, window, PARTS, SHORTEST, BLOCK)
        last = length
        if PARTS > 1:
            begin += part * share
            last = tl.minimum(begin + share, length)  # below `begin` where a short row has fewer parts
        group = tl.arange(0, PADDED)
        size = tl.arange(0, SIZE)
        there = group < GROUP
        q = tl.load(
            query + row * query_row + (head * GROUP + group)[:, None] * query_head + size[None, :],
            mask=there[:, None],
            other=0.0,
        )
        if NARROW:
            q = q.to(tl.float16)
        base = slot * key_slot + head * key_head
        scale_base = slot * scale_slot + head * scale_head
        best = tl.full((PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        mixed = tl.zeros((PADDED, SIZE), tl.float32)
        for start in range(begin, last, BLOCK):
            column = start + tl.arange(0, BLOCK)
            visible = (column >= first) & (column < last)
            places = base + column[:, None].to(tl.int64) * key_column + size[None, :]
            k = tl.load(keys + places, mask=visible[:, None], other=0.0)
            v = tl.load(values + places, mask=visible[:, None], other=0.0)
            if NARROW:
                k, v = k.to(tl.float16), v.to(tl.float16)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if NARROW:
                scores *= tl.load(key_scales + scale_base + column, mask=visible, other=0.0)[None, :]
            scores = tl.where(visible[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(best - higher)
            total = total * shrink + tl.sum(weights, 1)
            if NARROW:
                # Relative to the block's largest scale, so that small values do not underflow in fp16.
                worth = tl.load(value_scales + scale_base + column, mask=visible, other=0.0)
                most = tl.max(worth, 0)
                weights *= (worth / most)[None, :]
                fresh = tl.dot(weights.to(v.dtype), v, input_precision="ieee") * most
            else:
                fresh = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            mixed = mixed * shrink[:, None] + fresh
            best = higher
        if PARTS > 1:
            at = ((row * tl.num_programs(1) + head) * GROUP + group) * PARTS + part
            tl.store(bests + at, best, mask=there)
            tl.store(totals + at, total, mask=there)
            tl.store(mixes + at[:, None] * SIZE + size[None, :], mixed, mask=there[:, None])
        else:
            mixed = mixed / total[:, None]
            tl.store(
                out + row * out_row + (head * GROUP + group)[:, None] * out_head + size[None, :],
                mixed.to(out.dtype.element_ty),
                mask=there[:, None],
            )

    @triton.jit
    def _join_kernel(  # type: ignore[no-untyped-def]
        bests, totals, mixes, out, lengths, window, out_row, out_head,
        SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SHORTEST: tl.constexpr,
    ):  # fmt: skip
        """One query head of one row: parts weighted by the exponential of their largest score."""
        row, query = tl.program_id(0), tl.program_id(1)
        length = tl.load(lengths + row).to(tl.int32)
        _first, begin, share = _division(length, window, PARTS, SHORTEST, BLOCK)
        part, size = tl.arange(0, PARTS), tl.arange(0, SIZE)
        there = begin + part * share < length
        at = (row * tl.num_programs(1) + query) * PARTS + part
        best = tl.load(bests + at, mask=there, other=float("-inf"))
        weight = tl.exp(best - tl.max(best, 0))
        total = tl.sum(tl.load(totals + at, mask=there, other=0.0) * weight, 0)
        mixed = tl.load(mixes + at[:, None] * SIZE + size[None, :], mask=there[:, None], other=0.0)
        joined = tl.sum(mixed * weight[:, None], 0) / total
        tl.store(out + row * out_row + query * out_head + size, joined.to(out.dtype.element_ty))


def slot_attention(
    query_BQD: Tensor,
    pool: KeyValues,
    slots_B: Tensor,
    lengths_B: Tensor,
    scale: float,
    window: int,
    parts: int = 1,
) -> Tensor:
    """`slot_attention_plain` as a kernel with `parts` (a power of two) programs per row and key/value head."""
    rows, queries, size = query_BQD.shape
    keys_SHCD, values_SHCD = pool.keys_SHCD, pool.values_SHCD
    narrow = pool.key_scales_SHC is not None
    key_scales = pool.key_scales_SHC if pool.key_scales_SHC is not None else keys_SHCD
    value_scales = pool.value_scales_SHC if pool.value_scales_SHC is not None else values_SHCD
    heads = keys_SHCD.shape[1]
    group = queries // heads
    block = NARROW_BLOCK if narrow else BLOCK
    out_BQD = torch.empty_like(query_BQD, memory_format=torch.contiguous_format)
    best_BQP = total_BQP = mixed_BQPD = out_BQD  # used for several parts only
    if parts > 1:
        best_BQP = query_BQD.new_empty((rows, queries, parts), dtype=torch.float32)
        total_BQP, mixed_BQPD = torch.empty_like(best_BQP), best_BQP.new_empty(rows, queries, parts, size)
    _kernel[(rows, heads, parts)](
        query_BQD, keys_SHCD, values_SHCD, key_scales, value_scales, out_BQD, best_BQP, total_BQP, mixed_BQPD,
        slots_B, lengths_B, scale, window, query_BQD.stride(0), query_BQD.stride(1),
        keys_SHCD.stride(0), keys_SHCD.stride(1), keys_SHCD.stride(2), key_scales.stride(0), key_scales.stride(1),
        out_BQD.stride(0), out_BQD.stride(1),
        GROUP=group, PADDED=max(16, 1 << (group - 1).bit_length()), SIZE=size, BLOCK=block, NARROW=narrow,
        PARTS=parts, SHORTEST=SHORTEST_PART, num_warps=max(1, size // 128) if narrow else WARPS, num_stages=3,
    )  # fmt: skip
    if parts > 1:
        _join_kernel[(rows, queries)](
            best_BQP, total_BQP, mixed_BQPD, out_BQD, lengths_B, window, out_BQD.stride(0), out_BQD.stride(1),
            SIZE=size, BLOCK=block, PARTS=parts, SHORTEST=SHORTEST_PART, num_warps=WARPS,
        )  # fmt: skip
    return out_BQD


def kernel_fits(queries: int, heads: int, size: int) -> bool:
    """Whether the kernel can serve these shapes on this machine."""
    return triton is not None and queries % heads == 0 and size in (16, 32, 64, 128, 256)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; `key` and `value` are in the layer's pool already."""
    places = options["slots"]
    window = int(options.get("sliding_window") or 0)
    function = slot_attention if query.is_cuda else slot_attention_plain
    mixed_BQD = function(
        query[:, :, 0],
        options["pools"][module.layer_idx].pool,
        places.slots_B,
        places.ends_B,
        options["scaling"],
        window,
        places.parts,
    )
    return mixed_BQD[:, None], None
