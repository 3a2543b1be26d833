"""Problems, timings, memory and result rows of benchmarks/losses/losses.py."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.losses.objective import Objective
from understudy.types.loss import LossInputs, StudentHead, TeacherHead

VOCAB, TOPK = 151_936, 64
GIB = 1 << 30
Run = Callable[[], Tensor]
WARM_TURNS = 3
"""Untimed rounds: a cool GPU runs its first GEMMs a tenth faster than it can sustain."""


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


@dataclass
class Measure:
    """One path beside its floor. Both are medians of the same alternating series, so a drifting clock moves both."""

    milliseconds: float
    floor_milliseconds: float
    ratio: float
    """Median of the ratios of neighbours in that series."""
    extra_gib: float


def measure(problem: Problem, run: Run, floor: Floor, gemms: int, repeats: int) -> Measure | str:
    """Forward and backward beside the GEMM floor, and peak memory above inputs and returned gradients; or
    why it failed."""
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
        problem.clear()
        floors, times = alternate(problem, run, floor, gemms, repeats)
        ratio = statistics.median(mine / theirs for mine, theirs in zip(times, floors, strict=True))
        return Measure(statistics.median(times), statistics.median(floors), ratio, extra / GIB)
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # a peer that cannot run is a missing row, not a crash
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        problem.clear()
        gc.collect()
        torch.cuda.empty_cache()


def alternate(
    problem: Problem, run: Run, floor: Floor, gemms: int, repeats: int
) -> tuple[list[float], list[float]]:
    """(floor, path) milliseconds, floor and path alternating without synchronisation in between.

    The GEMMs of a floor keep the device busy while the host queues the path behind them, as the layers of a
    model do in a training step; both see the same clock, which moves by several percent within a minute
    under such load.
    """
    marks: list[torch.cuda.Event] = []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    for _ in range(WARM_TURNS):
        floor.run(gemms)
        run().backward()
        problem.clear()
    for _ in range(repeats):
        mark()
        floor.run(gemms)
        mark()
        run().backward()
        mark()
        problem.clear()
    torch.cuda.synchronize()
    parts = [marks[i : i + 3] for i in range(0, len(marks), 3)]
    return [a.elapsed_time(b) for a, b, _ in parts], [b.elapsed_time(c) for _, b, c in parts]


class Floor:
    """The unavoidable GEMMs, on a problem's own tensors: logits, ∂hidden, ∂weight, and the teacher's logits."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        hidden, weight = problem.hidden.detach(), problem.weight.detach()
        self.logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device)
        self.d_hidden, self.d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run(self, gemms: int) -> None:
        hidden, weight = self.problem.hidden.detach(), self.problem.weight.detach()
        if gemms == 4:
            torch.mm(self.problem.teacher_hidden, self.problem.teacher_weight.t(), out=self.logits)
        torch.mm(hidden, weight.t(), out=self.logits)
        torch.mm(self.logits, weight, out=self.d_hidden)
        torch.mm(self.logits.t(), hidden, out=self.d_weight)


def ours(problem: Problem, objective: Objective) -> Run:
    return lambda: objective(StudentHead(problem.hidden, problem.weight), problem.inputs).loss
