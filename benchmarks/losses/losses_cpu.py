"""The chunked torch path against the plain formula on a CPU (benchmarks/losses/losses.py --cpu)."""

from __future__ import annotations

import gc
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from losses_peers import verl_topk
from losses_problem import TOPK, Row, against, make_problem, ours
from understudy.losses.objective import Objective


def cpu_child(path: str) -> None:
    """Measure one path in this process and print it: peak resident memory above inputs and gradients, median
    seconds."""
    problem = make_problem(4096, 512, 50_000, TOPK, torch.float32, "cpu")
    run = ours(problem, Objective("forward_kl", tail="drop")) if path == "chunked" else verl_topk(problem)
    small = make_problem(64, 512, 2000, TOPK, torch.float32, "cpu")
    (
        ours(small, Objective("forward_kl", tail="drop")) if path == "chunked" else verl_topk(small)
    )().backward()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident_kib("VmRSS")
    times = []
    for _ in range(3):
        problem.clear()
        start = time.perf_counter()
        run().backward()
        times.append(time.perf_counter() - start)
    assert problem.hidden.grad is not None and problem.weight.grad is not None
    returned = (problem.hidden.grad.nbytes + problem.weight.grad.nbytes) / 1024
    print(
        json.dumps(
            {"extra_kib": resident_kib("VmHWM") - before - returned, "seconds": statistics.median(times)}
        )
    )


def resident_kib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    return float(found.group(1)) if found else float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def benchmark_cpu() -> list[Row]:
    results = {}
    for path in ("plain", "chunked"):
        command = [sys.executable, __file__, path]
        results[path] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(
            f"{path}: {results[path]['seconds']:.2f} s, {results[path]['extra_kib'] / 1024:.0f} MiB extra",
            flush=True,
        )
    memory = results["plain"]["extra_kib"] / results["chunked"]["extra_kib"]
    name = "CPU 4096×512×50000 top-64 forward KL"
    return [
        against(f"{name}: time", results["chunked"]["seconds"], "s", "plain formula", results["plain"]["seconds"], 1.0),
        Row(
            f"{name}: extra memory", results["chunked"]["extra_kib"] / 1024, "MiB", "plain formula",
            results["plain"]["extra_kib"] / 1024, memory, 5.0, memory >= 5.0, "ratio = plain / ours",
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    cpu_child(sys.argv[1])
