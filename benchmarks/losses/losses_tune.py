"""Launch settings of the Triton kernels, swept on one chunk (benchmarks/losses/losses.py --tune)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from losses_problem import TOPK, VOCAB, Row, make_problem
from understudy.losses.fused import triton_rows
from understudy.losses.fused.rows import ViewGradients
from understudy.losses.fused.transform import LogitTransform
from understudy.losses.objective import Objective

SPIN_CYCLES = 1_000_000
"""The device spins this long (about half a millisecond) while the host queues what is timed."""


def tune() -> list[Row]:
    """Kernel-only times of several launch settings on one chunk; copy the best into fused/triton_rows.py."""
    problem = make_problem(2816, 256, VOCAB, TOPK, torch.bfloat16, "cuda")
    inputs, count = problem.inputs, problem.inputs.num_tokens
    chunk = (problem.hidden.detach() @ problem.weight.detach().t()).contiguous()
    master = chunk.clone()
    teacher = (problem.teacher_hidden @ problem.teacher_weight.t()).contiguous()
    ones = torch.full((count,), 1e-3, device="cuda")
    grads = ViewGradients(ones * 0, None, None, ones, has_logp=False)
    transform = LogitTransform()
    parameters = Objective("jsd").parameters
    rows = chunked_gemms()

    def candidates() -> None:
        read = triton_rows.TritonCandidateRows(
            chunk, transform, inputs.token_ids_N, inputs.teacher_ids_NK, inputs.teacher_logprobs_NK,
            "forward_kl", parameters, "bucket", None, with_gradient=True,
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
        ("full jsd summary", triton_rows.FULL_SUMMARY_TWICE, full("jsd"), 7),
        ("full jsd gradient", triton_rows.FULL_GRADIENT, full("jsd"), 7),
    )
    for name, settings, run, passes in jobs:
        kept = dict(settings)
        best = (float("inf"), "")
        for block in (1024, 2048, 8192, 16384):
            for warps in (1, 2, 4, 8, 16, 32):
                if not 8 <= block // (32 * warps) <= 32:
                    continue
                settings.update(BLOCK=block, num_warps=warps)
                milliseconds = median_ms(run, lambda: chunk.copy_(master))
                best = min(best, (milliseconds, f"BLOCK={block} num_warps={warps}"))
                rate = passes * chunk.nbytes / milliseconds / 1e9
                label = f"tune {name} BLOCK={block} warps={warps}"
                print(f"  {label:55s} {milliseconds:7.3f} ms  {rate:5.2f} TB/s", flush=True)
                rows.append(Row(label, milliseconds, "ms"))
        settings.clear()
        settings.update(kept)
        print(f"  best for {name}: {best[1]} ({best[0]:.3f} ms), now {kept}", flush=True)
    return rows


def chunked_gemms() -> list[Row]:
    """The GEMMs alone, in the chunks of the top-K path: the cost of chunking itself against the floor."""
    rows = []
    for tokens, width, size in ((8192, 1024, 4096), (8192, 4096, 4096), (32768, 2048, 5504)):
        hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(VOCAB, width, device="cuda", dtype=torch.bfloat16)
        logits = torch.empty(size, VOCAB, device="cuda", dtype=torch.bfloat16)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)

        def logits_only(
            hidden: Tensor = hidden, weight: Tensor = weight, logits: Tensor = logits, size: int = size
        ) -> None:
            for part in hidden.split(size):
                torch.mm(part, weight.t(), out=logits[: len(part)])

        def d_hidden_only(
            weight: Tensor = weight, logits: Tensor = logits, out: Tensor = d_hidden, size: int = size
        ) -> None:
            for part in out.split(size):
                torch.mm(logits[: len(part)], weight, out=part)

        def d_weight_only(
            hidden: Tensor = hidden, logits: Tensor = logits, out: Tensor = d_weight, size: int = size
        ) -> None:
            for index, part in enumerate(hidden.split(size)):
                if index == 0:
                    torch.mm(logits[: len(part)].t(), part, out=out)
                else:
                    out.addmm_(logits[: len(part)].t(), part)

        for name, run in (("logits", logits_only), ("d hidden", d_hidden_only), ("d weight", d_weight_only)):
            milliseconds = median_ms(run, lambda: None)
            label = f"GEMM in chunks of {size}, {tokens}×{width}: {name}"
            print(f"  {label:55s} {milliseconds:7.3f} ms", flush=True)
            rows.append(Row(label, milliseconds, "ms"))
    return rows


def median_ms(run: Callable[[], object], before: Callable[[], object], repeats: int = 7) -> float:
    """Median milliseconds of `run`; `before` restores what it overwrites and is not timed."""
    times = []
    for _ in range(repeats + 2):
        before()
        torch.cuda._sleep(SPIN_CYCLES)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[2:])
