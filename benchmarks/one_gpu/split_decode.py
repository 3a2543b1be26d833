"""Decode attention of few long rows: one program per row and key head, beside rows divided into parts.

    python benchmarks/one_gpu/split_decode.py                             about 15 s on an H200
    TRITON_INTERPRET=1 python benchmarks/one_gpu/split_decode.py --tiny   to try it on a CPU

With one part, `slot_attention` reads a row's keys and values in one program per key head. Four rows of a model with two key
heads are eight programs, for 132 multiprocessors. With several, each part is a program of its own, and a second kernel
joins them. Both are compared with plain torch first. In the model of the 1.5B teacher, bfloat16. The parts that the
engine takes (`parts_for`) are measured, half of them and twice as many.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from understudy.engines.local.kernels.attention import parts_for, slot_attention, slot_attention_plain
from understudy.engines.local.kv_pool import KeyValues

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name, gpu_name
from step_problem import Row, save, show

QUERIES, HEADS, SIZE = 12, 2, 128
SHAPES = ((4, 32_000), (16, 32_000), (16, 8_192), (16, 1_024), (64, 8_192), (64, 2_048), (128, 512))
TINY = ((3, 300),)
_REPEATS = 20


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
        own = 4 if options.tiny else parts_for(count, HEADS, length, _processors())
        for parts in (1, max(2, own)):
            found = slot_attention(*given, 0, parts)
            torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
        print(f"{count} rows of {length}: equal", flush=True)
        if options.tiny:
            continue
        one = _microseconds(partial(slot_attention, *given, 0))
        for parts in sorted({max(2, own // 2), max(2, own), 2 * own}):
            many = _microseconds(partial(slot_attention, *given, 0, parts))
            name = f"decode attention, {count} rows of {length}, {parts} parts"
            name += ", as the engine takes" * (parts == own)
            rows.append(
                Row(
                    name,
                    round(many, 1),
                    "us",
                    "one part",
                    round(one, 1),
                    round(many / one, 3),
                )
            )
            print(show(rows[-1]), flush=True)
        save("split_decode", hardware, rows, options.out)


def _processors() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count


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
