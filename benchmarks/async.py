"""Sync beside fully async on the same work, in one run: rows/s, idle ratios, held-out accuracy and KL.

    python benchmarks/async.py                   # CPU: the quickstart's models, rollouts of long-tailed length
    python benchmarks/async.py --steps 10 --seeds 1 --staleness 1
    python benchmarks/async.py --gpu             # one GPU: beside TRL with vLLM colocated (async_gpu.py)
    python benchmarks/async.py --gpu --tiny      # the same script with tiny shapes on the CPU, to try it

Every configuration trains on the same prompts, with the same rollout lengths (long_tail.py) and the same
number of updates. Rows/s are measured over the middle steps, without the windows that began at the start and
the last ones, after which no new window begins. Accuracy is on held-out problems, KL on the last steps'
rows, none of which was trained on before; both are compared over seeds. The long tail leaves time for few
updates, so the cost of staleness is measured a second time, without the tail, over as many updates as these
students need to learn (`--learn-steps`). Takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent))

import understudy
from async_gpu import compare_on_gpu
from hardware import cpu_name
from understudy.dataplane.ledger import audit

ASSETS = Path(str(resources.files("understudy.assets") / "quickstart"))
RESULTS = Path(__file__).parent / "results"
GOAL = 1.5


@dataclass(frozen=True)
class Outcome:
    rows_per_second: float
    trainer_idle: float | None
    rollout_idle: float | None
    teacher_idle: float | None
    """Measured by fully async runs only."""
    accuracy: float
    kl: float
    staleness: float
    oldest: float


def learning_recipe(
    folder: Path, staleness: float | None, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The recipe with the same students and problems, plain rollouts and the quickstart's batches."""
    table = recipe(folder, staleness, seed, arguments)
    del table["rollout"]["agent"]
    steps = arguments.learn_steps
    table["trainer"] |= {
        "steps": steps, "batch_size": 128, "learning_rate": 3e-3, "warmup_steps": 5, "checkpoint_every": steps,
    }  # fmt: skip
    return table


def recipe(folder: Path, staleness: float | None, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    table: dict[str, Any] = {
        "student": {"model": str(ASSETS / "models" / "student")},
        "teachers": {
            key: {"model": str(ASSETS / "models" / f"teacher-{key}"), "key": key} for key in ("add", "sort")
        },
        "loss": {"topk": 8},
        "rollout": {"max_new_tokens": 8, "max_batch": 128, "agent": "long_tail:LongTail"},
        "data": {
            "train": str(ASSETS / "data" / "train.jsonl"),
            "eval": str(ASSETS / "data" / "valid.jsonl"),
            "reward": "understudy.rollout.rewards.builtin:exact_match",
        },
        "trainer": {
            "steps": arguments.steps, "batch_size": arguments.batch_size, "learning_rate": 1e-3, "schedule": "linear",
            "warmup_steps": max(1, arguments.steps // 10), "checkpoint_every": arguments.steps, "eval_samples": 400,
        },
        # Both sides batch by arrival: composing batches by key would only slow the sync side down.
        "run": {"dir": str(folder), "seed": seed, "determinism": "fast", "threads": 1},
    }  # fmt: skip
    if staleness is not None:
        table["trainer"] |= {"mode": "fully_async", "max_staleness": staleness}
    return table


Make = Callable[[Path, float | None, int, argparse.Namespace], dict[str, Any]]


def measure(make: Make, staleness: float | None, seed: int, arguments: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        run = understudy.train(make(Path(folder) / "run", staleness, seed, arguments), progress=False)
        report = audit(run.dir)
        assert report.balanced, "the ledger does not add up"
        steps = [line for line in run.metrics if line["step"] > 0]
    # The largest staleness decides how many steps are cut, so that all configurations compare the same
    # steps.
    cut = max(1, len(steps) // 10, math.ceil(max(arguments.staleness, default=0.0)) + 1)
    steady = steps[cut:-cut]
    seconds = sum(line["time/step"] for line in steady)
    rows = sum(line["rollout/rows"] for line in steady)

    def mean(key: str) -> float | None:
        found = [line[key] for line in steady if key in line]
        return statistics.fmean(found) if found else None

    waiting = statistics.fmean(line.get("time/produce", 0.0) / line["time/step"] for line in steady)
    return Outcome(
        rows_per_second=rows / seconds,
        trainer_idle=mean("perf/async/trainer_idle") if staleness is not None else waiting,
        rollout_idle=mean("perf/async/rollout_idle"),
        teacher_idle=mean("perf/async/teacher_idle"),
        accuracy=steps[-1]["val/accuracy"],
        kl=statistics.fmean(line["actor/loss"] for line in steps[-cut:]),
        staleness=mean("async/staleness/mean") or 0.0,
        oldest=max(line.get("async/staleness/max", 0.0) for line in steps),
    )


def name_of(staleness: float | None) -> str:
    return "sync" if staleness is None else f"fully async, staleness {staleness:g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--staleness", type=float, nargs="*", default=[0.0, 0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--learn-steps", type=int, default=80, help="0 leaves the second question out")
    parser.add_argument("--out", type=Path, default=None, help="the result file; with --gpu its folder")
    gpu = parser.add_argument_group("with --gpu")
    gpu.add_argument("--gpu", action="store_true", help="compare on one GPU (async_gpu.py)")
    gpu.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to try the script")
    gpu.add_argument("--quick", action="store_true", help="a smaller batch and shorter answers")
    gpu.add_argument(
        "--systems", nargs="*", choices=["plain", "sync", "trl"], default=["plain", "sync", "trl"],
        help="besides fully async runs under --mps; plain: fully async without it",
    )  # fmt: skip
    gpu.add_argument(
        "--trl-python",
        default=os.environ.get("UNDERSTUDY_VLLM_PYTHON", sys.executable),
        help="an interpreter that can import trl and vllm",
    )
    gpu.add_argument("--counted", type=int, default=4, help="windows counted of each fully async run")
    gpu.add_argument(
        "--every",
        type=int,
        nargs="+",
        default=[1],
        help="updates between publishes, of the run at staleness 1",
    )
    gpu.add_argument(
        "--kv-cache", nargs="+", choices=["model", "fp8"], default=["model"],
        help="how rollouts keep keys and values, of the runs at staleness 1",
    )  # fmt: skip
    gpu.add_argument("--max-batch", type=int, default=0, help="rows decoded together; a batch when not set")
    gpu.add_argument("--eager-student", action="store_true", help="the student's layers not compiled")
    gpu.add_argument("--engine", default="{}", help='more keys of [rollout], as JSON: {"processes": 1}')
    gpu.add_argument(
        "--publish",
        nargs="*",
        choices=["drain", "recompute", "keep"],
        default=["drain"],
        help="what a publish does to rollouts in progress: wait for them, or let them continue with keys and values computed again or kept",
    )
    gpu.add_argument(
        "--mps", action="store_true", help="one more run under the driver's multi-process service"
    )
    gpu.add_argument("--each", type=float, default=120.0, help="seconds for one of our runs at most")
    gpu.add_argument("--budget", type=float, default=320.0, help="seconds for everything")
    arguments = parser.parse_args()
    if arguments.gpu:
        compare_on_gpu(arguments)
        return
    outcomes: dict[float | None, list[Outcome]] = {}
    print(
        f"{'':<28}{'rows/s':>8}{'trainer':>9}{'rollout':>9}{'teacher':>9}{'accuracy':>10}{'KL':>8}{'age':>6}{'max':>5}"
    )
    for seed in range(arguments.seeds):
        # Other staleness values run with one seed; the pair that has a goal runs with every seed,
        # alternating.
        chosen = [None, *arguments.staleness] if seed == 0 else [None, 1.0]
        for staleness in chosen:
            outcome = measure(recipe, staleness, seed, arguments)
            outcomes.setdefault(staleness, []).append(outcome)
            show(staleness, outcome, seed)
    learned: dict[float | None, list[Outcome]] = {}
    if arguments.learn_steps:
        print(f"without the long tail, {arguments.learn_steps} steps of 128:")
        for seed in range(arguments.seeds):
            for staleness in (None, 1.0):
                outcome = measure(learning_recipe, staleness, seed, arguments)
                learned.setdefault(staleness, []).append(outcome)
                show(staleness, outcome, seed)
    write(outcomes, learned, arguments)


def show(staleness: float | None, outcome: Outcome, seed: int) -> None:
    idle = "".join(
        f"{'–' if value is None else f'{value:.0%}':>9}"
        for value in (outcome.trainer_idle, outcome.rollout_idle, outcome.teacher_idle)
    )
    print(
        f"{name_of(staleness):<28}{outcome.rows_per_second:>8.1f}{idle}{outcome.accuracy:>10.1%}{outcome.kl:>8.4f}"
        f"{outcome.staleness:>6.2f}{outcome.oldest:>5.0f}   seed {seed}",
        flush=True,
    )


def write(
    outcomes: dict[float | None, list[Outcome]],
    learned: dict[float | None, list[Outcome]],
    arguments: argparse.Namespace,
) -> None:
    sync = outcomes[None]
    pace = statistics.fmean(outcome.rows_per_second for outcome in sync)
    rows: list[dict[str, Any]] = []
    for staleness, own in outcomes.items():
        value = statistics.fmean(outcome.rows_per_second for outcome in own)
        ratio = statistics.fmean(
            one.rows_per_second / other.rows_per_second for one, other in zip(own, sync, strict=False)
        )
        goal = GOAL if staleness == 1.0 else None
        rows.append(
            {
                "name": f"{name_of(staleness)}: rows/s", "value": round(value, 2), "unit": "rows/s", "peer": "sync, same run",
                "peer_value": round(pace, 2), "ratio": round(ratio, 3), "goal": goal,
                "met": None if goal is None else ratio >= goal,
                "accuracy": [round(outcome.accuracy, 4) for outcome in own], "kl": [round(outcome.kl, 5) for outcome in own],
                "idle": {side: _mean_idle(own, side) for side in ("trainer", "rollout", "teacher")},
                "oldest_row": max(outcome.oldest for outcome in own),
            }
        )  # fmt: skip
    if 1.0 in outcomes and len(sync) > 1:
        rows += [
            _beside_sync(f"staleness 1: {name} beside sync over seeds", name, sync, outcomes[1.0], least)
            for name, least in (("accuracy", 0.005), ("kl", 0.01))
        ]
    if learned and len(learned[None]) > 1:
        after = f"after {arguments.learn_steps} steps of 128 without the tail"
        rows += [
            _beside_sync(f"staleness 1: {name} beside sync {after}", name, learned[None], learned[1.0], least)
            for name, least in (("accuracy", 0.005), ("kl", 0.01))
        ]
    path = arguments.out or RESULTS / f"async-{cpu_name()}-{time.strftime('%Y-%m-%d')}.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['name']:<48} {row['value']:>9} {row['unit']:<10} ratio {row['ratio']}  goal {row['goal']}  met {row['met']}"
        )
    print(f"written to {path}")


def _mean_idle(outcomes: list[Outcome], side: str) -> float | None:
    found = [value for outcome in outcomes if (value := getattr(outcome, f"{side}_idle")) is not None]
    return round(statistics.fmean(found), 3) if found else None


def _beside_sync(
    title: str, name: str, sync: list[Outcome], own: list[Outcome], least: float
) -> dict[str, Any]:
    """The mean difference over seeds against their spread; a spread below `least` counts as `least`."""
    differences = [getattr(one, name) - getattr(other, name) for one, other in zip(own, sync, strict=False)]
    spread = max(statistics.stdev(getattr(one, name) for one in side) for side in (sync, own))
    mean = statistics.fmean(differences)
    return {
        "name": title, "value": round(mean, 4), "unit": "difference",
        "peer": "spread over seeds", "peer_value": round(spread, 4), "ratio": None, "goal": "within two spreads",
        "met": abs(mean) <= 2 * max(spread, least),
        "sync": [round(getattr(one, name), 4) for one in sync], "fully_async": [round(getattr(one, name), 4) for one in own],
    }  # fmt: skip


if __name__ == "__main__":
    main()
