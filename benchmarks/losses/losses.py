"""Fused losses beside their peers and the hardware's floor, in one run.

    python benchmarks/losses/losses.py                 on a GPU: check against float64, then time every path at four shapes
    python benchmarks/losses/losses.py --tune          also sweep launch settings of the kernels
    python benchmarks/losses/losses.py --cpu           chunked torch path against the plain formula, 4096 × 512 × 50,000

The floor is the unavoidable work: the GEMMs for logits, ∂hidden and ∂weight (and one more for a teacher's
logits), each in one piece on the same tensors. Floor and path alternate and a ratio is the median over
neighbours: the clock of a loaded GPU drifts by several percent, and so affects both alike. There is no
synchronisation between them, so the host queues ahead of the device as it does in a training step. Extra
memory is the peak above inputs, weights and the two returned gradients. Peers (trl, liger_kernel) are used
if they import and reported as missing otherwise; verl's top-k formula is written out. Results go to
benchmarks/results/losses-<hardware>-<date>.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from losses_cpu import benchmark_cpu
from losses_peers import PEERS
from losses_problem import (
    TOPK,
    VOCAB,
    Floor,
    Measure,
    Problem,
    Row,
    against,
    make_problem,
    measure,
    ours,
)
from understudy.losses.objective import Objective
from understudy.losses.plain import head_logits
from understudy.types.loss import StudentHead, StudentLogits, TeacherHead

SHAPES = ((8192, 1024), (8192, 4096), (32768, 2048), (65536, 2048))
KINDS = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd", "mixture")

OURS = {
    "top-64 forward KL": (Objective("forward_kl"), 3, 1.15, "verl's top-k formula"),
    "top-64 reverse KL": (Objective("reverse_kl"), 3, 1.15, ""),
    "sampled k2": (Objective("k2", "sampled"), 3, 1.15, ""),
    "full forward KL": (Objective("forward_kl", "hidden"), 4, 1.25, "TRL chunked forward KL"),
    "full reverse KL": (Objective("reverse_kl", "hidden"), 4, 1.25, ""),
    "full JSD": (Objective("jsd", "hidden"), 4, 1.25, "Liger fused linear JSD"),
}
"""Name → objective, GEMMs in its floor, goal as a multiple of the floor, peer to compare with."""


def check_on_gpu() -> list[Row]:
    """Checks every objective against the plain path in float64, on fresh numbers and poisoned memory, before
    timing."""
    rows = []
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for tokens, width, vocab in ((384, 256, 5003), (512, 192, 16384)):
            problem = make_problem(tokens, width, vocab, TOPK, dtype, "cuda", seed=tokens + vocab)
            worst, worst_name = 0.0, ""
            for objective in objectives_to_check(vocab * dtype.itemsize * 200):
                error = worst_error(problem, objective)
                if not error <= worst:
                    worst, worst_name = error, f"{objective.kind}/{objective.signal}/{objective.tail}"
            name = f"error vs float64, {str(dtype).removeprefix('torch.')}, {tokens}×{width}×{vocab}"
            rows.append(
                Row(name, worst, "relative", goal=bound, met=worst <= bound, note=f"worst: {worst_name}")
            )
            print(f"{name}: {worst:.2e} ({worst_name}), bound {bound:g}", flush=True)
    return rows


def objectives_to_check(chunk_bytes: int) -> list[Objective]:
    smooth = [
        kind for kind in KINDS if kind != "tvd"
    ]  # tvd's gradient jumps where p = q: checked in float32 tests only
    return [
        *(
            Objective(kind, signal, chunk_bytes=chunk_bytes)
            for kind in smooth
            for signal in ("topk", "hidden")
        ),
        *(Objective(kind, tail="renormalise", chunk_bytes=chunk_bytes) for kind in ("forward_kl", "jsd")),
        *(Objective(kind, "sampled", chunk_bytes=chunk_bytes) for kind in ("k2", "k3+")),
        Objective("forward_kl", tail="drop", chunk_bytes=chunk_bytes),
    ]


def worst_error(problem: Problem, objective: Objective) -> float:
    """Largest relative error of loss, ∂hidden and ∂weight."""
    hidden, weight = (
        tensor.detach().double().requires_grad_() for tensor in (problem.hidden, problem.weight)
    )
    wide = problem.inputs._map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    object.__setattr__(wide, "teacher_head", TeacherHead(problem.teacher_weight.double()))
    expected = objective(StudentLogits(head_logits(hidden, StudentHead(hidden, weight))), wide).loss
    expected.backward()
    poison_memory()
    problem.clear()
    loss = objective(StudentHead(problem.hidden, problem.weight), problem.inputs).loss
    loss.backward()
    pairs = (
        (loss.detach(), expected.detach()),
        (problem.hidden.grad, hidden.grad),
        (problem.weight.grad, weight.grad),
    )
    errors = []
    for found, wanted in pairs:
        assert found is not None and wanted is not None
        errors.append(float((found.double() - wanted).norm() / wanted.norm()))
    return max(errors) if all(error == error for error in errors) else float("inf")


def poison_memory() -> None:
    """Fills free memory with NaN, so that reads of uninitialised memory show."""
    junk = [torch.full((size << 20,), float("nan"), device="cuda") for size in (1, 4, 16, 64)]
    del junk


def benchmark_shape(tokens: int, width: int, with_peers: bool) -> list[Row]:
    problem = make_problem(tokens, width, VOCAB, TOPK, torch.bfloat16, "cuda")
    repeats = 15 if tokens * width <= 8192 * 1024 else 7
    floor = Floor(problem)
    shape = f"{tokens}×{width}"
    print(f"\n{shape}: time and floor measured in turns, {repeats} times", flush=True)
    rows: list[Row] = []
    floors: dict[int, list[float]] = {3: [], 4: []}
    peers: dict[str, Measure] = {}
    for name, build in PEERS.items() if with_peers else ():
        gemms = 3 if "verl" in name else 4
        try:
            found = measure(problem, build(problem), floor, gemms, 3)
        except ImportError as error:
            found = f"not importable: {error}"
        if isinstance(found, str):
            print(f"  {name:28s} {found}", flush=True)
            rows.append(Row(f"{shape} {name}", None, "ms", note=found))
            continue
        peers[name] = found
        print_line(name, found)
        rows.append(beside_floor(f"{shape} {name}: time", found))
        rows.append(Row(f"{shape} {name}: extra memory", found.extra_gib, "GiB"))
    for name, (objective, gemms, goal, peer) in OURS.items():
        found = measure(problem, ours(problem, objective), floor, gemms, repeats)
        if isinstance(found, str):
            print(f"  {name:28s} {found}", flush=True)
            rows.append(Row(f"{shape} {name}: time", None, "ms", goal=goal, met=False, note=found))
            continue
        print_line(name, found)
        floors[gemms].append(found.floor_milliseconds)
        rows.append(beside_floor(f"{shape} {name}: time", found, goal))
        memory = Row(
            f"{shape} {name}: extra memory", found.extra_gib, "GiB", goal=2.0, met=found.extra_gib <= 2.0
        )
        if peer in peers:
            memory.peer, memory.peer_value = peer, peers[peer].extra_gib
            memory.ratio = found.extra_gib / max(peers[peer].extra_gib, 1e-9)
            beside = f"{shape} {name}: time beside peer"
            rows.append(against(beside, found.milliseconds, "ms", peer, peers[peer].milliseconds))
        rows.append(memory)
    for gemms, seen in floors.items():
        note = f"median of {len(seen)} series, {min(seen):.2f} to {max(seen):.2f} ms" if seen else ""
        rows.append(
            Row(f"{shape} floor, {gemms} GEMMs", statistics.median(seen) if seen else None, "ms", note=note)
        )
        print(f"  floor, {gemms} GEMMs: {note}", flush=True)
    return rows


def beside_floor(name: str, found: Measure, goal: float | None = None) -> Row:
    row = against(name, found.milliseconds, "ms", "GEMM floor", found.floor_milliseconds)
    row.ratio, row.goal = found.ratio, goal
    row.met = None if goal is None else found.ratio <= goal
    row.note = "floor and path in turns; the ratio is the median over neighbours"
    return row


def print_line(name: str, found: Measure) -> None:
    print(
        f"  {name:28s} {found.milliseconds:9.2f} ms  {found.ratio:6.3f} × floor ({found.floor_milliseconds:.2f} ms)"
        f"  {found.extra_gib:6.2f} GiB extra",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="measure the chunked torch path on this CPU")
    parser.add_argument("--tune", action="store_true", help="sweep launch settings of the kernels")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many shapes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    arguments = parser.parse_args()
    if arguments.cpu:
        hardware, rows = f"cpu-{torch.get_num_threads()}-threads", benchmark_cpu()
    elif torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
        print(f"{hardware}, torch {torch.__version__}", flush=True)
        rows = check_on_gpu()
        if arguments.tune:
            rows += importlib.import_module(
                "losses_tune"
            ).tune()  # needs Triton, which a CPU machine may lack
        for tokens, width in SHAPES[: arguments.shapes]:
            rows += benchmark_shape(tokens, width, not arguments.no_peers)
            torch.cuda.empty_cache()
    else:
        parser.error("no CUDA device; use --cpu")
    missed = [row for row in rows if row.met is False]
    print(f"\n{len(missed)} of {sum(row.met is not None for row in rows)} goals missed")
    for row in missed:
        print(f"  {row.name}: {row.value} {row.unit}, ratio {row.ratio}, goal {row.goal}; {row.note}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    target = arguments.out / f"losses-{slug}-{time.strftime('%Y-%m-%d')}.json"
    target.write_text(
        json.dumps(
            {"hardware": hardware, "torch": torch.__version__, "rows": [asdict(row) for row in rows]},
            indent=1,
        )
    )
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
