"""One training run with its evaluations, as rows of a result file: accuracy by step, seconds, tokens per second, GPU busy share.

    python benchmarks/one_gpu/curve.py recipes/gsm8k/qwen/forward-kl.toml --label "forward KL, sync" trainer.steps=40 …
    python benchmarks/one_gpu/curve.py recipes/gsm8k/qwen/forward-kl.toml --label "forward KL, fully async" \
        --beside "forward KL, sync" trainer.mode=fully_async …

It is the command a user types, `understudy train`. The run is ended when its last step is in metrics.jsonl, before it saves its
checkpoint: that of a 1.5B student has 22 GB. Rows are written after every evaluation, to curves-<hardware>-<date>.json, where
those of other labels stay. Rates leave out the first `--skip` steps, which compile. The run directory is OUT/LABEL.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name, gpu_name
from step_problem import Row, killed_at_the_end, show
from understudy.config import load_recipe
from user_load import Sampler

SHOWN = {
    "response_length/mean": "tokens",
    "response_length/clip_ratio": "share",
    "critic/score/mean": "mean reward",
    "actor/distillation/loss": "nats",
    "actor/entropy": "nats",
    "num_turns/mean": "turns",
    "async/staleness/mean": "publishes",
}
"""Metrics whose mean since the evaluation before is kept."""
_LOOK_SECONDS = 0.2


def main() -> None:
    options = _options()
    # Under --out, so that it is among the results also if this process is killed.
    run = options.out / re.sub(r"[^A-Za-z0-9.]+", "-", options.label).strip("-")
    keys = [*options.overrides, f"run.dir={run}", "trainer.checkpoint_every=1000000"]
    steps = load_recipe(options.recipe, keys).trainer.steps
    hardware = gpu_name() if torch.cuda.is_available() else cpu_name()
    path = options.out / f"curves-{hardware}-{time.strftime('%Y-%m-%d')}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "understudy.cli.main", "train", "--quiet", str(options.recipe), *keys]
    metrics, begun, evaluations = run / "metrics.jsonl", time.monotonic(), 0
    with Sampler() as sampler:
        process = subprocess.Popen(command)
        with killed_at_the_end(process):
            while True:
                ended = process.poll() is not None or time.monotonic() - begun > options.limit
                lines = read_lines(metrics)
                known = sum("val/accuracy" in line for line in lines)
                last = bool(lines) and lines[-1]["step"] >= steps
                if known > evaluations or ended or last:
                    evaluations = known
                    rows = rows_of(options.label, lines, sampler.values, options.skip)
                    keep(path, options.label, rows, options.beside)
                if ended or last:
                    break
                time.sleep(_LOOK_SECONDS)
    print(*map(show, rows), sep="\n", flush=True)
    print(
        f"{options.label}: {len(lines)} lines of {steps} steps in {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    if not last:
        raise SystemExit(f"the run did not reach its last step; its exit code is {process.returncode}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the run is writing the file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def rows_of(label: str, lines: Sequence[Mapping[str, Any]], busy: Sequence[float], skip: int) -> list[Row]:
    """Of each evaluation its accuracies and the means since the one before; of all steps the rates."""
    rows: list[Row] = []
    since: list[Mapping[str, Any]] = []
    for line in lines:
        since.append(line)
        found = {
            key: line[key] for key in line if re.match(r"val/(accuracy|pass@|avg@|teacher_accuracy)", key)
        }
        if not found:
            continue
        name = f"{label}, after {line['step']} steps"
        rows += [Row(f"{name}: {key.removeprefix('val/')}", round(found[key], 4), "share") for key in found]
        for key, unit in SHOWN.items():
            if values := [one[key] for one in since if key in one]:
                rows.append(
                    Row(f"{name}: {key}, mean since the last evaluation", round(mean(values), 4), unit)
                )
        since = []
    counted = [line for line in lines if line["step"] > skip and "time/step" in line]
    if counted:
        seconds = [line["time/step"] for line in counted]
        tokens = sum(line["response_length/mean"] * line["rollout/rows"] for line in counted)
        rows += [
            Row(f"{label}: rate", round(tokens / sum(seconds), 1), "completion tokens/s"),
            Row(f"{label}: step", round(median(seconds), 3), "s"),
            Row(f"{label}: {len(counted)} steps", round(sum(seconds), 1), "s"),
        ]
    if counted and busy:
        # From the start on: what loads, compiles and evaluates is among it.
        rows.append(
            Row(
                f"{label}: GPU busy, start and evaluations included",
                round(mean(busy) / 100, 3),
                "share of time",
            )
        )
    return rows


def keep(path: Path, label: str, rows: Sequence[Row], beside: str) -> None:
    """Writes the rows in place of earlier ones of this label. Rows of `beside` are the peers of those of the same name."""
    before = json.loads(path.read_text()) if path.exists() else []
    others = [row for row in before if not is_of(label, row["name"])]
    peers = {
        row["name"].removeprefix(beside): row["value"]
        for row in others
        if beside and is_of(beside, row["name"])
    }
    for row in rows:
        value = peers.get(row.name.removeprefix(label))
        if value is not None:
            row.peer, row.peer_value = beside, value
            row.ratio = round(row.value / value, 3) if value else None
    path.write_text(json.dumps([*others, *map(asdict, rows)], indent=1) + "\n")


def is_of(label: str, name: str) -> bool:
    return name.startswith((f"{label}:", f"{label}, after "))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--label", required=True, help="name of the run in the result file")
    parser.add_argument(
        "--beside", default="", help="label of an earlier run of the day whose rows are the peers"
    )
    parser.add_argument("--skip", type=int, default=3, help="steps that rates leave out")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for the run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result file and the run")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
