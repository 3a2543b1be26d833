"""Fused losses beside their peers and the hardware's floor, in one run.

    python benchmarks/losses.py                 on a GPU: check against float64, then time every path at four shapes
    python benchmarks/losses.py --tune          also sweep launch settings of the kernels
    python benchmarks/losses.py --cpu           chunked torch path against the plain formula, 4096 × 512 × 50,000

The floor is what nobody can avoid: the GEMMs for logits, ∂hidden and ∂weight (and one more for a teacher's logits), timed
here on the same tensors. Extra memory is the peak above inputs, weights and the two returned gradients. Peers are taken
from the path if they import (trl, liger_kernel) and are reported as missing otherwise; verl's top-k formula is written out.
Results go to benchmarks/results/losses-<hardware>-<date>.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from understudy.losses.objective import Objective
from understudy.losses.plain import head_logits
from understudy.types.loss import LossInputs, StudentHead, StudentLogits, TeacherHead

VOCAB, TOPK = 151_936, 64
SHAPES = ((8192, 1024), (8192, 4096), (32768, 2048), (65536, 2048))
GIB = 1 << 30
KINDS = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd", "mixture")
Run = Callable[[], Tensor]


@dataclass
class Row:
    """One line of the result file."""

    name: str
    value: float | None
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    goal: float | None = None
    met: bool | None = None
    note: str = ""


def against(
    name: str, value: float, unit: str, peer: str, peer_value: float | None, goal: float | None = None
) -> Row:
    """A row whose ratio is value / peer_value and whose goal bounds that ratio."""
    ratio = None if not peer_value else value / peer_value
    return Row(
        name,
        value,
        unit,
        peer,
        peer_value,
        ratio,
        goal,
        None if goal is None or ratio is None else ratio <= goal,
    )


# ---------------------------------------------------------------------------------------------------- inputs


@dataclass
class Problem:
    """A student and a teacher of the same width, with everything the paths and the peers read."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    inputs: LossInputs

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None


def make_problem(
    tokens: int, width: int, vocab: int, topk: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Problem:
    torch.manual_seed(seed)

    def normal(rows: int, scale: float) -> Tensor:
        return (torch.randn(rows, width, device=device, dtype=torch.float32) * scale).to(dtype)

    hidden, teacher_hidden = normal(tokens, 1.0), normal(tokens, 1.0)
    weight, teacher_weight = normal(vocab, width**-0.5), normal(vocab, 1.5 * width**-0.5)
    token_ids = torch.randint(0, vocab, (tokens,), device=device)
    best_ids, best_logprobs, sampled = [], [], []
    for part in torch.arange(tokens, device=device).split(512):
        log_p = torch.log_softmax((teacher_hidden[part] @ teacher_weight.t()).float(), -1)
        best = log_p.topk(topk)
        best_ids.append(best.indices)
        best_logprobs.append(best.values)
        sampled.append(log_p.gather(1, token_ids[part, None])[:, 0])
    inputs = LossInputs(
        token_ids_N=token_ids,
        weights_N=torch.full((tokens,), 1.0 / tokens, device=device),
        positions_N=torch.arange(tokens, device=device),
        teacher_logprobs_N=torch.cat(sampled),
        teacher_ids_NK=torch.cat(best_ids),
        teacher_logprobs_NK=torch.cat(best_logprobs),
        teacher_hidden_NH=teacher_hidden,
        teacher_head=TeacherHead(teacher_weight),
    )
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), teacher_hidden, teacher_weight, inputs)


# ---------------------------------------------------------------------------------------------------- correctness


def check_on_gpu() -> list[Row]:
    """Every objective against the plain twin in float64, on fresh numbers and poisoned memory, before anything is timed."""
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
        *(Objective(kind, tail="renormalise", chunk_bytes=chunk_bytes) for kind in smooth),
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
    pairs = ((loss, expected), (problem.hidden.grad, hidden.grad), (problem.weight.grad, weight.grad))
    errors = [float((found.double() - wanted).norm() / wanted.norm()) for found, wanted in pairs]
    return max(errors) if all(error == error for error in errors) else float("inf")


def poison_memory() -> None:
    """Leave NaN in whatever the allocator hands out next."""
    junk = [torch.full((size << 20,), float("nan"), device="cuda") for size in (1, 4, 16, 64)]
    del junk


# ---------------------------------------------------------------------------------------------------- measuring


@dataclass
class Measure:
    milliseconds: float
    extra_gib: float


def measure(problem: Problem, run: Run, repeats: int) -> Measure | str:
    """Median time of forward and backward, and peak memory above inputs and returned gradients; or why not."""
    try:
        problem.clear()
        run().backward()  # compile, warm up
        problem.clear()
        run().backward()
        returned = sum(t.grad.nbytes for t in (problem.hidden, problem.weight) if t.grad is not None)
        problem.clear()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run().backward()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - returned
        times = [time_once(problem, run) for _ in range(repeats)]
        return Measure(statistics.median(times), extra / GIB)
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # a peer that cannot run is a missing row, not a crash
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        problem.clear()
        gc.collect()
        torch.cuda.empty_cache()


def time_once(problem: Problem, run: Run) -> float:
    problem.clear()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run().backward()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def gemm_floor(problem: Problem, repeats: int) -> tuple[float, float]:
    """Milliseconds of the three unavoidable GEMMs, and of one more for the teacher's logits."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def timed(*products: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(repeats + 2):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for product in products:
                product()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        return statistics.median(times[2:])

    three = timed(
        lambda: torch.mm(hidden, weight.t(), out=logits),
        lambda: torch.mm(logits, weight, out=d_hidden),
        lambda: torch.mm(logits.t(), hidden, out=d_weight),
    )
    teacher = timed(lambda: torch.mm(problem.teacher_hidden, problem.teacher_weight.t(), out=logits))
    return three, three + teacher


def ours(problem: Problem, objective: Objective) -> Run:
    return lambda: objective(StudentHead(problem.hidden, problem.weight), problem.inputs).loss


# ---------------------------------------------------------------------------------------------------- peers


def verl_topk(problem: Problem) -> Run:
    """verl's forward_kl_topk: whole logits, log-softmax in their dtype, gather, Σ p·(log p − log q)."""
    log_p = problem.inputs.teacher_logprobs_NK

    def run() -> Tensor:
        log_q = torch.log_softmax(problem.hidden @ problem.weight.t(), -1).gather(
            -1, problem.inputs.teacher_ids_NK
        )
        return (problem.inputs.weights_N * (log_p.exp() * (log_p - log_q)).sum(-1)).sum()

    return run


def trl_chunked(problem: Problem, beta: float) -> Run:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def run() -> Tensor:
        losses, _ = ChunkedDivergenceFunction.apply(
            problem.hidden, problem.weight, None, problem.teacher_hidden, problem.teacher_weight, None, beta
        )
        return (problem.inputs.weights_N * losses).sum()

    return run


def liger_jsd(problem: Problem, beta: float) -> Run:
    from liger_kernel.transformers import LigerFusedLinearJSD

    module = LigerFusedLinearJSD(jsd_beta=beta)
    return lambda: module(problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight)


PEERS: dict[str, Callable[[Problem], Run]] = {
    "verl's top-k formula": verl_topk,
    "TRL chunked forward KL": lambda problem: trl_chunked(problem, 0.0),
    "TRL chunked JSD": lambda problem: trl_chunked(problem, 0.5),
    "Liger fused linear JSD": lambda problem: liger_jsd(problem, 0.5),
}

OURS = {
    "top-64 forward KL": (Objective("forward_kl"), 3, 1.15, "verl's top-k formula"),
    "top-64 reverse KL": (Objective("reverse_kl"), 3, 1.15, ""),
    "sampled k2": (Objective("k2", "sampled"), 3, 1.15, ""),
    "full forward KL": (Objective("forward_kl", "hidden"), 4, 1.25, "TRL chunked forward KL"),
    "full reverse KL": (Objective("reverse_kl", "hidden"), 4, 1.25, ""),
    "full JSD": (Objective("jsd", "hidden"), 4, 1.25, "Liger fused linear JSD"),
}
"""Name → objective, GEMMs in its floor, goal as a multiple of the floor, peer to stand beside."""


def benchmark_shape(tokens: int, width: int, with_peers: bool) -> list[Row]:
    problem = make_problem(tokens, width, VOCAB, TOPK, torch.bfloat16, "cuda")
    repeats = 11 if tokens * width <= 8192 * 1024 else 5
    floors = dict(zip((3, 4), gemm_floor(problem, repeats), strict=True))
    torch.cuda.empty_cache()
    shape = f"{tokens}×{width}"
    print(f"\n{shape}: floor {floors[3]:.2f} ms (3 GEMMs), {floors[4]:.2f} ms (4 GEMMs)", flush=True)
    rows = [Row(f"{shape} floor, {count} GEMMs", value, "ms") for count, value in floors.items()]
    peers: dict[str, Measure] = {}
    for name, build in PEERS.items() if with_peers else ():
        try:
            found = measure(problem, build(problem), 3)
        except ImportError as error:
            found = f"not importable: {error}"
        if isinstance(found, str):
            print(f"  {name:28s} {found}", flush=True)
            rows.append(Row(f"{shape} {name}", None, "ms", note=found))
            continue
        peers[name] = found
        floor = floors[3 if "top-k" in name else 4]
        print_line(name, found, floor)
        rows.append(against(f"{shape} {name}: time", found.milliseconds, "ms", "GEMM floor", floor))
        rows.append(Row(f"{shape} {name}: extra memory", found.extra_gib, "GiB"))
    for name, (objective, gemms, goal, peer) in OURS.items():
        found = measure(problem, ours(problem, objective), repeats)
        if isinstance(found, str):
            print(f"  {name:28s} {found}", flush=True)
            rows.append(Row(f"{shape} {name}: time", None, "ms", goal=goal, met=False, note=found))
            continue
        print_line(name, found, floors[gemms])
        rows.append(
            against(f"{shape} {name}: time", found.milliseconds, "ms", "GEMM floor", floors[gemms], goal)
        )
        memory = Row(
            f"{shape} {name}: extra memory", found.extra_gib, "GiB", goal=2.0, met=found.extra_gib <= 2.0
        )
        if peer in peers:
            memory.peer, memory.peer_value = peer, peers[peer].extra_gib
            memory.ratio = found.extra_gib / max(peers[peer].extra_gib, 1e-9)
            rows.append(
                against(
                    f"{shape} {name}: time beside peer",
                    found.milliseconds,
                    "ms",
                    peer,
                    peers[peer].milliseconds,
                )
            )
        rows.append(memory)
    return rows


def print_line(name: str, found: Measure, floor: float) -> None:
    ratio = found.milliseconds / floor
    print(
        f"  {name:28s} {found.milliseconds:9.2f} ms  {ratio:5.2f} × floor  {found.extra_gib:6.2f} GiB extra",
        flush=True,
    )


# ---------------------------------------------------------------------------------------------------- launch settings


def tune() -> list[Row]:
    """Kernel-only times of several launch settings on one chunk; the best belong into fused/triton_rows.py."""
    from understudy.losses.fused import triton_rows
    from understudy.losses.fused.rows import ViewGradients

    problem = make_problem(2816, 256, VOCAB, TOPK, torch.bfloat16, "cuda")
    inputs, count = problem.inputs, problem.inputs.num_tokens
    chunk = (problem.hidden.detach() @ problem.weight.detach().t()).contiguous()
    teacher = (problem.teacher_hidden @ problem.teacher_weight.t()).contiguous()
    ones = torch.full((count,), 1e-3, device="cuda")
    grads = ViewGradients(ones * 0, None, None, ones)
    transform = triton_rows.LogitTransform()
    parameters = Objective("jsd").parameters
    rows = []

    def candidates() -> None:
        read = triton_rows.TritonCandidateRows(
            chunk, transform, inputs.token_ids_N, inputs.teacher_ids_NK, inputs.teacher_logprobs_NK,
            "forward_kl", parameters, "bucket", overlap=False, with_gradient=True,
        )  # fmt: skip
        read.gradient(grads)

    def full(kind: str) -> Callable[[], None]:
        def run() -> None:
            triton_rows.TritonFullRows(
                chunk, transform, teacher, transform, inputs.token_ids_N, kind, parameters
            ).gradient(grads)

        return run

    jobs = (
        ("candidates", triton_rows.EXPONENTIATE, candidates, 2),
        ("full forward_kl summary", triton_rows.FULL_SUMMARY, full("forward_kl"), 5),
        ("full forward_kl gradient", triton_rows.FULL_GRADIENT, full("forward_kl"), 5),
        ("full jsd summary", triton_rows.FULL_SUMMARY, full("jsd"), 7),
        ("full jsd gradient", triton_rows.FULL_GRADIENT, full("jsd"), 7),
    )
    for name, settings, run, passes in jobs:
        kept = dict(settings)
        best = (float("inf"), "")
        for block in (1024, 2048, 4096, 8192, 16384):
            for warps in (2, 4, 8, 16, 32):
                if not 8 <= block // (32 * warps) <= 64:
                    continue
                settings.update(BLOCK=block, num_warps=warps)
                milliseconds = median_ms(run)
                best = min(best, (milliseconds, f"BLOCK={block} num_warps={warps}"))
                rate = passes * chunk.nbytes / milliseconds / 1e9
                label = f"tune {name} BLOCK={block} warps={warps}"
                print(f"  {label:55s} {milliseconds:7.3f} ms  {rate:5.2f} TB/s", flush=True)
                rows.append(Row(label, milliseconds, "ms"))
        settings.clear()
        settings.update(kept)
        print(f"  best for {name}: {best[1]} ({best[0]:.3f} ms), now {kept}", flush=True)
    return rows


def median_ms(run: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[2:])


# ---------------------------------------------------------------------------------------------------- CPU


def cpu_child(path: str) -> None:
    """Measure one path in this process and print it: peak resident memory above inputs and gradients, median seconds."""
    problem = make_problem(4096, 512, 50_000, TOPK, torch.float32, "cpu")
    problem.inputs = problem.inputs._map(lambda tensor: tensor)
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
        command = [sys.executable, __file__, "--cpu-child", path]
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="measure the chunked torch path on this CPU")
    parser.add_argument("--cpu-child", choices=("plain", "chunked"), help=argparse.SUPPRESS)
    parser.add_argument("--tune", action="store_true", help="sweep launch settings of the kernels")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many shapes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if arguments.cpu_child:
        cpu_child(arguments.cpu_child)
        return 0
    if arguments.cpu:
        hardware, rows = f"cpu-{torch.get_num_threads()}-threads", benchmark_cpu()
    elif torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
        print(f"{hardware}, torch {torch.__version__}", flush=True)
        rows = check_on_gpu()
        if arguments.tune:
            rows += tune()
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
