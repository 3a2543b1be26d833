"""What the simulation of `understudy plan` predicts, beside what was measured on one H200; and 8, 64 and 512 GPUs on paper.

    python benchmarks/simulation.py            seconds: predictions beside measurements
    python benchmarks/simulation.py --page     minutes: also writes the table of 8, 64 and 512 GPUs into docs/scaling.md

Nothing is measured here. Phase times come from some rows of benchmarks/results, predictions are compared with other rows
of other runs:

    decode           256 and 512 rows of 128 + 512 tokens, generated alone, give the time of a step and that of a cached token
    prefill          a token: a teacher of this size without candidates; a pass: the long-tailed load
    score, update    of the 256 rows, each alone
    1.7B             a token of the cache takes as long as in the 0.6B (both have 28 layers of 8 key heads), as does a
                     pass; the time of a step comes from the public load

Results go to benchmarks/results/simulation-nvidia-h200-<date>.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "rollout"))
from public_load_side import LOADS, PLACES  # noqa: E402
from step_problem import Row, save  # noqa: E402
from understudy.planning.simulation.inputs import (  # noqa: E402
    Costs,
    Prediction,
    Split,
    StepTime,
    Work,
    enough_steps,
    quantile_lengths,
    sync_windows,
)
from understudy.planning.simulation.recommend import Devices, recommend  # noqa: E402
from understudy.planning.simulation.simulate import simulate  # noqa: E402
from understudy.planning.windows import Windows  # noqa: E402

VOCABULARY = 151_936
PROMPT, NEW, ROWS = 128, 512, 256
"""The shape "256 x 512" of step.py, which the sync and fully async steps and the phases alone have in common."""
GOAL = 0.1
PAGE = HERE.parent / "docs" / "scaling.md"
PUBLISH_BETWEEN_MACHINES = 1.0
HOST_ROW = 0.0002
"""Assumptions of the table on paper."""


class Measured:
    """Rows of the result files of one GPU."""

    def __init__(self, hardware: str) -> None:
        self._hardware = hardware

    def __call__(self, benchmark: str, date: str, name: str) -> float:
        path = HERE / "results" / f"{benchmark}-{self._hardware}-{date}.json"
        found = json.loads(path.read_text())
        rows = found if isinstance(found, list) else found["rows"]
        return next(float(row["value"]) for row in rows if row["name"] == name)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that an engine gets at once."""

    prompts: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Decode steps when all requests have a place from the start."""
        return max(self.new)

    @property
    def reads(self) -> float:
        """Cached tokens read in those steps, summed over steps."""
        return sum(
            count * prompt + count**2 / 2 for prompt, count in zip(self.prompts, self.new, strict=True)
        )


def load(name: str) -> Load:
    requests = LOADS[name](VOCABULARY)
    prompts = tuple(len(request.tokens) for request in requests)
    stops = len(requests[0].stops)
    if not stops:
        return Load(prompts, tuple(request.new for request in requests))
    # Every token ends the answer with the same chance: the quantiles of a geometric distribution, cut at the limit.
    rate = math.log1p(-stops / VOCABULARY)
    survive = [1 - (index + 0.5) / len(requests) for index in range(len(requests))]
    return Load(prompts, tuple(min(requests[0].new, math.ceil(math.log(one) / rate)) for one in survive))


def uniform(rows: int) -> Load:
    return Load((PROMPT,) * rows, (NEW,) * rows)


def tokens_per_second(costs: Costs, requests: Load) -> float:
    """Generation alone: one engine, and an update that takes no time."""
    generate = replace(costs, host_row=0.0, update_token=0.0, publish=0.0)
    work = Work(tuple(sorted(requests.new)), prompt_tokens=round(mean(requests.prompts)), max_batch=PLACES)
    found = simulate(generate, work, sync_windows(len(requests.new), 12), Split(1, 1, 0))
    return mean(requests.new) * found.rows_per_second


def small_costs(measured: Measured) -> Costs:
    """Of the 0.6B student and the 1.7B teacher on one GPU."""
    alone = partial(measured, "async", "2026-11-16")
    token = 1 / measured("scoring", "2026-11-15", "0.6b 2047 K=0 scored=1 delivered")
    times = {rows: alone(f"decoding alone, {rows} rows of 512 new tokens") for rows in (ROWS, 2 * ROWS)}
    # Both take the same steps, and the second reads twice the cache.
    first, second = (seconds - rows * PROMPT * token for rows, seconds in times.items())
    cached = (second - first) / uniform(ROWS).reads
    step = (first - cached * uniform(ROWS).reads) / uniform(ROWS).steps
    scored = alone("score alone, 256 rows of 640 tokens, 512 scored, top-64")
    costs = Costs(
        decode=StepTime.affine(step),
        decode_cached=cached,
        prefill_token=token,
        host_row=measured("step", "2026-11-16", "256 x 512: idle") / ROWS,
        score_token=scored / (ROWS * (PROMPT + NEW)),
        update_token=measured("update", "2026-11-18", "256 x 512: update, default") / (ROWS * (PROMPT + NEW)),
        publish=measured("step", "2026-11-16", "256 x 512: publish"),
    )
    goal = measured("public_load", "2026-11-19", "0.6b, long-tail: hf engine")
    return replace(costs, prefill_pass=_pass_time(costs, goal))


def _pass_time(costs: Costs, goal: float) -> float:
    low, high = 0.0, 0.1
    for _ in range(30):
        middle = (low + high) / 2
        faster = tokens_per_second(replace(costs, prefill_pass=middle), load("long-tail")) > goal
        low, high = (middle, high) if faster else (low, middle)
    return (low + high) / 2


def larger_engine(measured: Measured, small: Costs) -> Costs:
    """The 1.7B as an engine."""
    requests = load("public")
    rate = measured("public_load", "2026-11-19", "1.7b, public: hf engine")
    prefill = small.score_token  # of the same model as a teacher, its head included
    seconds = sum(requests.new) / rate - sum(requests.prompts) * prefill - small.prefill_pass
    step = (seconds - small.decode_cached * requests.reads) / requests.steps
    return replace(small, decode=StepTime.affine(step), prefill_token=prefill)


def predictions(measured: Measured) -> list[Row]:
    small = small_costs(measured)
    large = larger_engine(measured, small)
    public = partial(measured, "public_load", "2026-11-19")
    rows = [
        Row("0.6B engine, one decode step besides its cache", round(small.decode(1) * 1e3, 3), "ms"),
        Row(
            "0.6B engine, each cached token in a decode step", round(small.decode_cached * 1e9, 1), "ns"
        ),
        Row("0.6B engine, one pass over prompts besides their tokens", round(small.prefill_pass * 1e3, 2), "ms"),
        Row("1.7B engine, one decode step besides its cache", round(large.decode(1) * 1e3, 3), "ms"),
    ]  # fmt: skip
    held_out = [("0.6b", "public"), ("0.6b", "early-end"), ("1.7b", "long-tail"), ("1.7b", "early-end")]
    for model, name in held_out:
        costs = small if model == "0.6b" else large
        rate = tokens_per_second(costs, load(name))
        rows.append(_row(f"{model}, {name} load", rate, public(f"{model}, {name}: hf engine"), "tokens/s"))
    rows_of_a_step = ROWS * NEW
    step = _step(small, sync_windows(ROWS, 12), ROWS)
    price = measured("determinism", "2026-11-19", "256 x 512: sync step, determinism = fast")
    rows.append(_row("sync step", step.step_seconds, price, "s"))
    for every, suffix in ((1, ""), (2, ", publishing every 2 updates")):
        # The three sides share one GPU: together they do one device's work.
        found = _step(small, Windows(ROWS, every, 1.0, enough_steps(1.0, every)), ROWS * every, capacity=1.0)
        rate = measured("async", "2026-11-16", f"run 7, 256 x 512: fully async, staleness 1{suffix}, MPS")
        rows.append(_row(f"fully async step{suffix}", found.step_seconds, rows_of_a_step / rate, "s"))
    return rows


def _step(costs: Costs, windows: Windows, places: int, capacity: float | None = None) -> Prediction:
    work = Work((NEW,), prompt_tokens=PROMPT, max_batch=places)
    return simulate(costs, work, windows, Split(1, 1, 1, capacity), partial_rollouts=False)


def _row(name: str, predicted: float, measured: float, unit: str) -> Row:
    ratio = predicted / measured
    return Row(
        f"{name}, predicted", round(predicted, 3), unit, "measured", round(measured, 3), round(ratio, 3),
        f"within {GOAL:.0%}", abs(ratio - 1) <= GOAL,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OnPaper:
    gpus: int
    prompts: int


SIZES = (OnPaper(8, 64), OnPaper(64, 512), OnPaper(512, 1024), OnPaper(512, 4096))
SCHEDULES = {"sync": 0.0, "staleness 1": 1.0, "staleness 4": 4.0}


def table(measured: Measured, simulated: Callable[[str], None]) -> str:
    """The 0.6B student and a 4B teacher, as Markdown."""
    teacher = measured("scoring", "2026-11-15", "4b 2047 K=64 scored=1 delivered")
    costs = replace(
        small_costs(measured),
        host_row=HOST_ROW,
        score_token=1 / teacher,
        update_fixed=measured("update", "2026-11-18", "256 x 512: update, default, optimizer"),
        publish=PUBLISH_BETWEEN_MACHINES,
    )
    work = Work(quantile_lengths((50, 200, 350, 500, 700, 1000, 3000)), prompt_tokens=200, max_batch=256, n=8)
    lines = [
        "| GPUs | prompts per batch | schedule | engines + trainer + teachers | rows/s | tokens/s | step | idle: trainer, rollout, teachers | rows per engine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        for name, staleness in SCHEDULES.items():
            split, found = (
                _sync(size, costs, work) if name == "sync" else _apart(size, staleness, costs, work)
            )
            rate = found.rows_per_second
            lines.append(
                f"| {size.gpus} | {size.prompts} | {name} | {split} | {rate:,.0f} | {rate * mean(work.lengths) / 1000:,.0f}k "
                f"| {found.step_seconds:.1f} s | {_idle(found)} | {found.occupancy:.0%} |"
            )
            simulated(lines[-1])
    return "\n".join(lines)


def _idle(found: Prediction) -> str:
    return ", ".join(
        f"{max(0.0, share):.0%}" for share in (found.trainer_idle, found.rollout_idle, found.teacher_idle)
    )


def _sync(size: OnPaper, costs: Costs, work: Work) -> tuple[str, Prediction]:
    """Rollout and trainer take turns on all GPUs that the teachers leave; the best number of teachers."""
    tried = {}
    for teachers in sorted({max(1, size.gpus // part) for part in (64, 32, 16, 8, 4)}):
        shared = size.gpus - teachers
        windows = sync_windows(size.prompts, 8)
        tried[teachers] = simulate(costs, work, windows, Split(shared, shared, teachers))
    best = max(tried, key=lambda teachers: tried[teachers].rows_per_second)
    return f"{size.gpus - best} shared + {best}", tried[best]


def _apart(size: OnPaper, staleness: float, costs: Costs, work: Work) -> tuple[str, Prediction]:
    windows = Windows(size.prompts, 1, staleness, enough_steps(staleness))
    found = recommend(Devices(size.gpus), costs, work, windows)
    split = found.split
    return f"{split.engines} + {split.trainer} + {split.replicas}", found.prediction


def write_page(made: Mapping[str, str]) -> None:
    """Replaces each table between its marks."""
    text = PAGE.read_text()
    for name, lines in made.items():
        before, begin, rest = text.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        if not (begin and end):
            raise SystemExit(f"{PAGE} needs the comments <!-- {name} --> and <!-- end of {name} -->")
        text = f"{before}{begin}\n\n{lines}\n\n{end}{after}"
    PAGE.write_text(text)


def _compared(rows: list[Row]) -> str:
    lines = ["| | predicted | measured | |", "|---|---|---|---|"]
    for row in rows:
        if row.ratio is not None and row.peer_value is not None:
            given = (
                f"{one:,.0f}" if row.unit == "tokens/s" else f"{one:.2f}"
                for one in (row.value, row.peer_value)
            )
            predicted, measured = given
            name = row.name.removesuffix(", predicted")
            lines.append(f"| {name} | {predicted} {row.unit} | {measured} | {row.ratio - 1:+.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="simulate many GPUs and write docs/scaling.md")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    measured = Measured("nvidia-h200")
    rows = predictions(measured)
    for row in rows:
        beside = (
            ""
            if row.ratio is None
            else f"   measured {row.peer_value:,}   {row.ratio - 1:+.1%}   {'met' if row.met else 'missed'}"
        )
        print(f"{row.name}: {row.value:,} {row.unit}{beside}")
    save("simulation", "nvidia-h200", rows, options.out)
    if options.page:
        write_page({"predictions": _compared(rows), "many GPUs": table(measured, partial(print, flush=True))})


if __name__ == "__main__":
    main()
