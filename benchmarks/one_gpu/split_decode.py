"""Decode attention of few long rows: one program per row and key head, as the engine has it, beside several.

    python benchmarks/one_gpu/split_decode.py                             about 15 s on an H200
    TRITON_INTERPRET=1 python benchmarks/one_gpu/split_decode.py --tiny   to try it on a CPU

`slot_attention` reads a row's keys and values in one program per key head. Four rows of a model with two key heads are eight
programs, for 132 multiprocessors. Here a row is cut into parts, each a program of its own, and a second kernel
adds the parts up. Both are compared with plain torch first. In the model of the 1.5B teacher, bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import triton
import triton.language as tl
from torch import Tensor

from understudy.engines.local.kernels.attention import BLOCK, WARPS, slot_attention, slot_attention_plain
from understudy.engines.local.kv_pool import KeyValues

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name, gpu_name
from step_problem import Row, save, show

QUERIES, HEADS, SIZE = 12, 2, 128
SHAPES = ((4, 32_000), (16, 32_000), (16, 8_192), (64, 2_048), (16, 512), (128, 512))
TINY = ((3, 300),)
PROGRAMS = 264
"""Programs to aim at: two per multiprocessor of an H200."""
_REPEATS = 20


@triton.jit
def _parts(  # type: ignore[no-untyped-def]
    query, keys, values, best_out, total_out, mixed_out, slots, lengths, scale,
    query_row, query_head, key_slot, key_head, key_column,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    first = part * share
    last = tl.minimum(first + share, length)
    group, size = tl.arange(0, PADDED), tl.arange(0, SIZE)
    there = group < GROUP
    q = tl.load(
        query + row * query_row + (head * GROUP + group)[:, None] * query_head + size[None, :],
        mask=there[:, None],
        other=0.0,
    )
    base = slot * key_slot + head * key_head
    best = tl.full((PADDED,), -1e38, tl.float32)  # finite: a part may hold no column
    total = tl.zeros((PADDED,), tl.float32)
    mixed = tl.zeros((PADDED, SIZE), tl.float32)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        visible = column < last
        places = base + column[:, None].to(tl.int64) * key_column + size[None, :]
        k = tl.load(keys + places, mask=visible[:, None], other=0.0)
        v = tl.load(values + places, mask=visible[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    at = ((row * tl.num_programs(1) + head) * SPLITS + part) * PADDED + group
    tl.store(best_out + at, best)
    tl.store(total_out + at, total)
    tl.store(mixed_out + at[:, None] * SIZE + size[None, :], mixed)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    best_in, total_in, mixed_in, out, out_row, out_head,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    group, size = tl.arange(0, PADDED), tl.arange(0, SIZE)
    best = tl.full((PADDED,), -1e38, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    mixed = tl.zeros((PADDED, SIZE), tl.float32)
    for part in range(SPLITS):
        at = ((row * tl.num_programs(1) + head) * SPLITS + part) * PADDED + group
        own = tl.load(best_in + at)
        higher = tl.maximum(best, own)
        shrink, grow = tl.exp(best - higher), tl.exp(own - higher)
        total = total * shrink + tl.load(total_in + at) * grow
        mixed = (
            mixed * shrink[:, None] + tl.load(mixed_in + at[:, None] * SIZE + size[None, :]) * grow[:, None]
        )
        best = higher
    tl.store(
        out + row * out_row + (head * GROUP + group)[:, None] * out_head + size[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty),
        mask=(group < GROUP)[:, None],
    )


def split_attention(
    query_BQD: Tensor, pool: KeyValues, slots_B: Tensor, lengths_B: Tensor, scale: float, splits: int
) -> Tensor:
    """As `slot_attention` without a window, with `splits` programs per row and key head."""
    rows, queries, size = query_BQD.shape
    keys_SHCD = pool.keys_SHCD
    heads = keys_SHCD.shape[1]
    group = queries // heads
    padded = max(16, 1 << (group - 1).bit_length())
    best = query_BQD.new_empty(rows, heads, splits, padded, dtype=torch.float32)
    total = torch.empty_like(best)
    mixed = best.new_empty(*best.shape, size)
    out_BQD = torch.empty_like(query_BQD, memory_format=torch.contiguous_format)
    _parts[(rows, heads, splits)](
        query_BQD, keys_SHCD, pool.values_SHCD, best, total, mixed, slots_B, lengths_B, scale,
        query_BQD.stride(0), query_BQD.stride(1), keys_SHCD.stride(0), keys_SHCD.stride(1), keys_SHCD.stride(2),
        SPLITS=splits, GROUP=group, PADDED=padded, SIZE=size, BLOCK=BLOCK, num_warps=WARPS, num_stages=3,
    )  # fmt: skip
    _sum[(rows, heads)](
        best, total, mixed, out_BQD, out_BQD.stride(0), out_BQD.stride(1),
        SPLITS=splits, GROUP=group, PADDED=padded, SIZE=size, num_warps=WARPS,
    )  # fmt: skip
    return out_BQD


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small shape, without times")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if options.tiny else ("cuda", torch.bfloat16)
    hardware, rows = cpu_name() if options.tiny else gpu_name(), []
    for count, length in TINY if options.tiny else SHAPES:
        torch.manual_seed(0)
        shape = (count + 1, HEADS, length, SIZE)
        keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        pool = KeyValues(keys, values)
        query = torch.randn(count, QUERIES, SIZE, device=device).to(dtype)
        slots = torch.arange(count, device=device)
        lengths = length - slots * (length // (2 * count))
        given = (query, pool, slots, lengths, SIZE**-0.5)
        expected = slot_attention_plain(*given, 0)
        splits = max(1, min(32, PROGRAMS // (max(count, 16) * HEADS)))
        found = split_attention(*given, max(splits, 5 if options.tiny else 1))
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(slot_attention(*given, 0).float(), expected.float(), rtol=2e-2, atol=2e-2)
        print(f"{count} rows of {length}: equal", flush=True)
        if options.tiny:
            continue
        one = _microseconds(partial(slot_attention, *given, 0))
        for parts in sorted({splits, 2 * splits, 4 * splits}):
            many = _microseconds(partial(split_attention, *given, parts))
            name = f"decode attention, {count} rows of {length}, {parts} programs per row and key head"
            rows.append(
                Row(
                    name,
                    round(many, 1),
                    "us",
                    "one program, as in the engine",
                    round(one, 1),
                    round(many / one, 3),
                )
            )
            print(show(rows[-1]), flush=True)
        save("split_decode", hardware, rows, options.out)


def _microseconds(run: Callable[[], Tensor]) -> float:
    """Of one call inside a CUDA graph, as the engine runs it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            run()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / _REPEATS)
    return median(times)


if __name__ == "__main__":
    main()
