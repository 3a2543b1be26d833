"""Measures the phase times of finished runs from metrics.jsonl and spans.jsonl, for the simulation.

    decode     time with rollouts in progress ÷ number of decode steps; one point per run, at its rows per batch
    score      time with requests at a teacher × its replicas ÷ tokens
    update     compute ÷ tokens, and the part of it that overlapped with scoring; optimizer, claim and all other time
               of a step outside its phases is fixed
    host       the rest of `produce`, per row: time in which nothing was rolled out or scored

Several runs with different batch sizes give the decode time several points. The first steps of a run are left
out: they include compilation and cold caches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from understudy.config import Recipe, parse_recipe
from understudy.config.checks.capacity import max_prompts
from understudy.errors import ConfigError
from understudy.observability.metrics import read_metrics
from understudy.observability.rundir import read_json
from understudy.planning.simulation.inputs import (
    Costs,
    Prediction,
    SimulatedBatching,
    Split,
    StepTime,
    Work,
    enough_steps,
    sync_windows,
)
from understudy.planning.simulation.simulate import simulate
from understudy.planning.windows import Windows

_WARM_UP = 3
_SIDES = ("trainer", "rollout", "teacher")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One finished run: its workload and its phase times."""

    recipe: Recipe
    costs: Costs
    """`decode` has one point, this run's."""
    work: Work
    windows: Windows
    split: Split
    rows_per_second: float
    step_seconds: float
    idle: Mapping[str, float]
    """Idle share by side, as the run measured it; empty for a sync run, which does not measure it."""

    def predicted(self, costs: Costs | None = None, capacity: float | None = None) -> Prediction:
        """A simulation of this run; with other costs, a prediction from the measurements of other runs."""
        split = Split(self.split.engines, self.split.trainer, self.split.replicas, capacity)
        partial = self.recipe.trainer.partial_rollouts
        return simulate(costs or self.costs, self.work, self.windows, split, partial_rollouts=partial)


def measure(run: Path) -> MeasuredRun:
    """Reads a run directory of either trainer."""
    recipe = parse_recipe(read_json(run / "recipe.json"))
    lines = [
        line
        for line in read_metrics(run / "metrics.jsonl")
        if line["step"] > _WARM_UP and "time/step" in line
    ]
    if len(lines) < 3:
        raise ConfigError(
            f"{run} has {len(lines)} steps after the first {_WARM_UP}; at least 3 are needed to measure"
        )
    rows = [int(line["rollout/rows"]) for line in lines]
    work = _work(recipe, lines, rows)
    replicas = {name: len(teacher.urls) or teacher.replicas for name, teacher in recipe.teachers.items()}
    spans = _spans(run / "spans.jsonl", lines, replicas)
    split = Split(max(1, recipe.rollout.processes), recipe.trainer.ranks, sum(replicas.values()))
    step_seconds = _mean(lines, "time/step")
    costs = Costs(
        decode=_decode(spans, work, split, rows),
        host_row=max(0.0, _mean(lines, "time/produce") - spans.working / len(lines)) / float(np.mean(rows))
        if recipe.trainer.mode == "sync"
        else 0.0,
        score_token=spans.replica_seconds / _tokens(lines),
        update_fixed=_fixed(lines),
        update_token=sum(line["time/update/compute"] + line.get("time/update/ahead", 0.0) for line in lines)
        / _tokens(lines)
        * recipe.trainer.ranks,
        ahead_token=sum(line.get("time/update/ahead", 0.0) for line in lines) / _tokens(lines),
        update_spread=_spread(lines),
        publish=_mean(lines, "time/publish"),
    )
    return MeasuredRun(
        recipe,
        costs,
        work,
        windows_of(recipe),
        split,
        rows_per_second=float(np.mean(rows)) / step_seconds,
        step_seconds=step_seconds,
        idle={
            side: _mean(lines, f"perf/async/{side}_idle") for side in _SIDES if recipe.trainer.mode != "sync"
        },
    )


def windows_of(recipe: Recipe) -> Windows:
    """A recipe's schedule, over as many windows as the simulation needs."""
    trainer = recipe.trainer
    if trainer.mode == "sync":
        return sync_windows(trainer.batch_size, enough_steps(0.0))
    steps = enough_steps(trainer.max_staleness, trainer.sync_every)
    most = max_prompts(recipe.rollout, recipe.dataplane)
    return Windows(trainer.batch_size, trainer.sync_every, trainer.max_staleness, steps, most)


def batching_of(recipe: Recipe) -> SimulatedBatching:
    """How its engines take rows: in batches composed by key under full determinism, else one by one."""
    by_key = recipe.run.determinism == "full" or (
        recipe.run.determinism is None and recipe.trainer.mode == "sync" and recipe.rollout.engine == "hf"
    )
    return SimulatedBatching.COMPOSED if by_key else SimulatedBatching.CONTINUOUS


def combined(runs: Sequence[MeasuredRun]) -> Costs:
    """The costs of several runs: means, and each run's point of the decode time."""
    points: dict[float, list[float]] = {}
    for run in runs:
        points.setdefault(run.costs.decode.rows[0], []).append(run.costs.decode.seconds[0])
    at = sorted(points)

    def mean(name: str) -> float:
        return float(np.mean([getattr(run.costs, name) for run in runs]))

    return Costs(
        decode=StepTime(tuple(at), tuple(float(np.mean(points[rows])) for rows in at)),
        **{
            name: mean(name)
            for name in (
                "host_row",
                "score_token",
                "update_fixed",
                "update_token",
                "ahead_token",
                "update_spread",
                "publish",
            )
        },
    )


@dataclass(frozen=True, slots=True)
class _Spans:
    rolling_out: float
    """Seconds with at least one rollout in progress."""
    working: float
    """Seconds with at least one rollout or score request in progress."""
    rows: int
    row_seconds: float
    """The sum of all rollouts' seconds."""
    replica_seconds: float
    """Seconds in which a teacher had score requests, times its replicas, summed over teachers."""


def _spans(path: Path, lines: Sequence[Mapping[str, Any]], replicas: Mapping[str, int]) -> _Spans:
    """The spans of the steps in `lines`: from the end of the step before them to the end of the last one."""
    found = [json.loads(text) for text in path.read_text().splitlines() if text.endswith("}")]
    ends = {
        span["step"]: span["end"]
        for span in found
        if span["name"] in ("publish", "update") and "step" in span
    }
    start, end = ends.get(lines[0]["step"] - 1, 0.0), ends[lines[-1]["step"]]
    inside = [span for span in found if span["start"] >= start and span["end"] <= end]
    rollouts = [(span["start"], span["end"]) for span in inside if span["name"] == "rollout"]
    scores = {
        teacher: [
            (span["start"], span["end"])
            for span in inside
            if span["name"] == "score" and span["teacher"] == teacher
        ]
        for teacher in replicas
    }
    return _Spans(
        rolling_out=_union(rollouts),
        working=_union([*rollouts, *(span for spans in scores.values() for span in spans)]),
        rows=len(rollouts),
        row_seconds=sum(end - start for start, end in rollouts),
        replica_seconds=sum(_union(spans) * replicas[teacher] for teacher, spans in scores.items()),
    )


def _union(spans: Sequence[tuple[float, float]]) -> float:
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _work(recipe: Recipe, lines: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> Work:
    mean, longest = _mean(lines, "response_length/mean"), _mean(lines, "response_length/max")
    tokens = _tokens(lines) / sum(rows)
    return Work(
        lengths=lengths_like(mean, longest, recipe.rollout.max_new_tokens, int(np.mean(rows))),
        prompt_tokens=max(0, round(tokens - mean)),
        n=recipe.rollout.n,
        max_batch=recipe.rollout.max_batch,
        batching=batching_of(recipe),
        recompute_kv=recipe.rollout.recompute_kv,
    )


def lengths_like(mean: float, longest: float, cap: int, rows: int, count: int = 1024) -> tuple[int, ...]:
    """A log-normal distribution, capped at `cap`, with this mean, whose longest of `rows` samples is about
    `longest`."""
    at = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    top = NormalDist().inv_cdf(1 - 0.5 / max(rows, 1))

    def location(sigma: float) -> float:
        """The location parameter that gives the mean, after the cap."""

        def short(middle: float) -> bool:
            return float(np.minimum(np.exp(middle + sigma * at), cap).mean()) < mean

        return _bisect(short, -4 * sigma, float(np.log(cap)) + 4 * sigma)

    def narrow(sigma: float) -> bool:
        return min(float(np.exp(location(sigma) + sigma * top)), cap) < longest

    sigma = _bisect(narrow, 0.0, 3.0)
    found = np.minimum(np.exp(location(sigma) + sigma * at), cap)
    return tuple(max(1, round(float(length))) for length in found)


def _bisect(too_low: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return (low + high) / 2


def _decode(spans: _Spans, work: Work, split: Split, rows: Sequence[int]) -> StepTime:
    """One point: seconds of a decode step at this run's batch size."""
    if work.batching is SimulatedBatching.CONTINUOUS:
        together = min(spans.row_seconds / spans.rolling_out / split.engines, work.max_batch)
        tokens = spans.rows * float(np.mean(work.lengths))
        return StepTime((together,), (spans.rolling_out * together * split.engines / tokens,))
    chance, steps = np.random.default_rng(0), 0.0
    for count in rows:  # a batch takes as many steps as its longest row has tokens; engines share the batches
        drawn = chance.choice(work.lengths, count)
        batches = [drawn[start : start + work.max_batch] for start in range(0, count, work.max_batch)]
        steps += sum(int(batch.max()) for batch in batches) / min(split.engines, len(batches))
    at = min(float(np.mean(rows)), float(work.max_batch))
    return StepTime((at,), (spans.rolling_out / steps,))


def _fixed(lines: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of a step that are neither waiting for rows, nor compute on tokens, nor the publish."""
    produce = "time/produce" if "time/produce" in lines[0] else "time/wait for rows"
    rest = _mean(lines, "time/step") - _mean(lines, produce) - _mean(lines, "time/publish")
    return max(0.0, rest - _mean(lines, "time/update/compute"))


def _spread(lines: Sequence[Mapping[str, Any]]) -> float:
    """Relative standard deviation of the update seconds per token."""
    seconds = [line["time/update"] / (line["perf/tokens_per_second"] * line["time/step"]) for line in lines]
    return float(np.std(seconds) / np.mean(seconds))


def _tokens(lines: Sequence[Mapping[str, Any]]) -> float:
    """Tokens that went through the trained model."""
    return float(sum(line["perf/tokens_per_second"] * line["time/step"] for line in lines))


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([line[name] for line in lines if name in line]))
