"""`understudy plan RECIPE --simulate [RUN]`: predicts a run's timing and its best split of devices."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from understudy.config import RolloutConfig
from understudy.errors import ConfigError
from understudy.observability.rundir import RunDir
from understudy.planning.simulation.inputs import (
    Costs,
    Prediction,
    SimulatedBatching,
    Split,
    StepTime,
    Work,
    enough_steps,
    quantile_lengths,
)
from understudy.planning.simulation.phase_times import MeasuredRun, combined, measure
from understudy.planning.simulation.recommend import Devices, recommend
from understudy.planning.simulation.simulate import simulate
from understudy.planning.windows import Windows

_STALENESS = (0.0, 0.5, 1.0, 2.0, 4.0)
_DEVICE_FLAGS = ("devices", "engine_devices", "replica_devices", "trainer_devices")
_COST_FLAGS = {
    "decode_cached": "that each cached token adds to a decode step of its engine; needs --decode",
    "prefill_pass": "of one pass over the prompts of rows that enter an engine, besides those of its tokens",
    "prefill_token": "of an engine per prompt token",
    "host_row": "of the one host process per row: template, reward, journal",
    "score_token": "of a teacher replica per token of prompt and response",
    "update_fixed": "of an update that do not shrink with more devices",
    "update_token": "of one trainer device per token",
    "publish": "of a publish",
}
"""Seconds, in place of what a run measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "simulation", "predict rows per second and idle shares, and recommend a split of devices"
    )
    group.add_argument(
        "--simulate",
        nargs="?",
        const="",
        metavar="RUN",
        help="phase times come from this finished run, or from the flags below",
    )
    group.add_argument(
        "--also", action="append", default=[], metavar="RUN", help="one more run to take phase times from"
    )
    group.add_argument("--devices", type=int, help="GPUs to share out among rollout, trainer and teachers")
    group.add_argument("--engine-devices", type=int, help="GPUs of one rollout engine (1)")
    group.add_argument("--replica-devices", type=int, help="GPUs of one teacher replica (1)")
    group.add_argument(
        "--trainer-devices", type=int, help="the trainer takes a multiple of this many GPUs (1)"
    )
    group.add_argument(
        "--decode",
        metavar="ROWS:SECONDS,…",
        help="seconds of one decode step of one engine by its rows, for example 1:0.008,256:0.013; with --decode-cached, "
        "without reading the cache",
    )
    for flag, what in _COST_FLAGS.items():
        group.add_argument(_flag(flag), type=float, metavar="SECONDS", help=f"seconds {what}")
    group.add_argument(
        "--lengths",
        metavar="Q0,…,Q1",
        help="new tokens of a row: quantiles at even steps, for example 50,300,900,4000",
    )
    group.add_argument("--prompt-tokens", type=int)
    group.add_argument(
        "--batching", choices=[kind.value for kind in SimulatedBatching], help="how an engine takes rows in"
    )


def check_flags(options: argparse.Namespace) -> None:
    """Refuses values out of range, and flags that would have no effect, before reading anything."""
    given = {
        name: getattr(options, name)
        for name in (*_DEVICE_FLAGS, *_COST_FLAGS, "decode", "lengths", "prompt_tokens", "batching", "also")
        if getattr(options, name) not in (None, [])
    }
    if options.simulate is None and given:
        raise ConfigError(
            f"{', '.join(map(_flag, given))}: only --simulate looks at it; add --simulate, or leave it out"
        )
    if options.simulate is not None and options.gpus is not None:
        raise ConfigError("--gpus is for drawing seats; --simulate shares out --devices")
    if "decode_cached" in given and "decode" not in given:
        raise ConfigError(
            "--decode-cached without --decode: a decode step that a run measured reads its cache already; give both"
        )
    least = {"prompt_tokens": 0} | dict.fromkeys(_DEVICE_FLAGS, 1) | dict.fromkeys(_COST_FLAGS, 0)
    problems = [
        f"{_flag(name)} {given[name]:g}: expected {bound} or more"
        for name, bound in least.items()
        if name in given and not (math.isfinite(given[name]) and given[name] >= bound)
    ]
    if problems:
        raise ConfigError(problems)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _measured(run: str) -> MeasuredRun:
    """Measurements of a run directory."""
    found = RunDir.open(run)
    if not found.spans.is_file():
        raise ConfigError(
            f"{run} has no {found.spans.name}: nothing was measured there; give a run that took some steps"
        )
    return measure(found.path)


def show(
    windows: Windows,
    rollout: RolloutConfig,
    batching: SimulatedBatching,
    options: argparse.Namespace,
    console: Console,
    *,
    partial: bool,
) -> None:
    """Prints what the recipe's schedule and rollouts would take. `partial`: generations continue under new
    weights."""
    runs = [_measured(run) for run in (options.simulate, *options.also) if run]
    costs, work = _costs(options, runs), _work(options, rollout, batching, runs)
    for run in runs:
        own, name = run.predicted(), run.recipe.run.dir
        console.print(
            f"{name}: measured {run.rows_per_second:,.2f} rows/s, its own phase times give {own.rows_per_second:,.2f} "
            f"({own.rows_per_second / run.rows_per_second - 1:+.0%})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    table = Table(title="simulation", title_justify="left")
    for column in ("schedule", "split", "rows/s", "step", "trainer idle", "rollout idle", "teacher idle"):
        table.add_column(
            column,
            justify="left" if column in ("schedule", "split") else "right",
            no_wrap=column in ("schedule", "split"),
        )
    if options.devices is None:
        split = runs[0].split if runs else _one_of_each(costs)
        for name, schedule in _schedules(windows):
            _add(table, name, split, simulate(costs, work, schedule, split, partial_rollouts=partial))
        console.print(table)
        return
    devices = Devices(
        options.devices,
        options.engine_devices or 1,
        options.replica_devices or 1,
        options.trainer_devices or 1,
    )
    best = recommend(devices, costs, work, windows, partial_rollouts=partial)
    for name, schedule in _schedules(windows):
        found = simulate(costs, work, schedule, best.split, partial_rollouts=partial)
        _add(table, name, best.split, found)
    console.print(table)
    console.print(
        f"recommended for {options.devices} devices with this recipe's schedule: {best.split} "
        f"({best.devices} in use), {best.prediction.rows_per_second:,.2f} rows/s",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _schedules(own: Windows) -> list[tuple[str, Windows]]:
    """The recipe's own schedule first, then the same work at other staleness bounds."""
    label = "sync" if own.max_staleness == 0 and own.sync_every == 1 else f"staleness {own.max_staleness:g}"
    others = []
    for staleness in _STALENESS:
        steps = enough_steps(staleness, own.sync_every)
        schedule = replace(own, max_staleness=staleness, steps=steps)
        if staleness != own.max_staleness:
            others.append(("on-policy" if staleness == 0 else f"staleness {staleness:g}", schedule))
    return [(f"{label} (the recipe)", own), *others]


def _add(table: Table, name: str, split: Split, found: Prediction) -> None:
    table.add_row(
        name,
        f"{split.engines} + {split.trainer} + {split.replicas}",
        f"{found.rows_per_second:,.2f}",
        f"{found.step_seconds:,.2f} s",
        *(f"{max(0.0, share):.0%}" for share in (found.trainer_idle, found.rollout_idle, found.teacher_idle)),
    )


def _costs(options: argparse.Namespace, runs: list[MeasuredRun]) -> Costs:
    given = {flag: getattr(options, flag) for flag in _COST_FLAGS if getattr(options, flag) is not None}
    if options.decode is not None:
        given["decode"] = _step_time(options.decode)
    if runs:
        return replace(combined(runs), **given)
    missing = [_flag(name) for name in ("decode", "update_token") if name not in given]
    if missing:
        raise ConfigError(
            f"--simulate without a run to measure needs {' and '.join(missing)}; or give a finished run: --simulate runs/NAME"
        )
    return Costs(**given)


def _work(
    options: argparse.Namespace, rollout: RolloutConfig, batching: SimulatedBatching, runs: list[MeasuredRun]
) -> Work:
    work = runs[0].work if runs else Work((rollout.max_new_tokens,), batching=batching)
    work = replace(work, n=rollout.n, max_batch=rollout.max_batch, recompute_kv=rollout.recompute_kv)
    if options.lengths is not None:
        work = replace(work, lengths=quantile_lengths(_quantiles(options.lengths)))
    if options.batching is not None:
        work = replace(work, batching=SimulatedBatching(options.batching))
    if options.prompt_tokens is not None:
        work = replace(work, prompt_tokens=options.prompt_tokens)
    return work


def _step_time(text: str) -> StepTime:
    points = sorted(tuple(_numbers("--decode", point, ":")) for point in text.split(","))
    if any(len(point) != 2 or min(point) <= 0 for point in points):
        raise ConfigError(
            f"--decode {text!r}: expected ROWS:SECONDS,… above 0, for example 1:0.008,256:0.013"
        )
    rows, seconds = zip(*points, strict=True)
    if len(set(rows)) < len(rows):
        raise ConfigError(f"--decode {text!r}: two times for the same number of rows; give each number once")
    if list(seconds) != sorted(seconds):
        raise ConfigError(f"--decode {text!r}: a step with more rows cannot take less time; measure again")
    return StepTime(rows, seconds)


def _quantiles(text: str) -> list[float]:
    found = _numbers("--lengths", text, ",")
    if found != sorted(found) or found[0] < 0:
        raise ConfigError(
            f"--lengths {text!r}: expected quantiles from the least to the most, for example 50,300,900,4000"
        )
    return found


def _numbers(flag: str, text: str, separator: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(separator)]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise ConfigError(f"{flag} {text!r}: expected numbers separated by {separator!r}")
    return found


def _one_of_each(costs: Costs) -> Split:
    return Split(1, 1, 1 if costs.score_token or costs.score_row else 0)
