"""A load like users': a real recipe on its real data, sync beside fully async, with the share of time the GPU computes.

    python benchmarks/one_gpu/user_load.py recipes/gsm8k/qwen/forward-kl.toml key=value …      about 120 s on an H200

Answers are as long as the student writes them on GSM8K (a tail up to `rollout.max_new_tokens`), rewards are computed, rows
are kept: the command a user types, without evaluation. A rate is tokens over seconds of the counted steps. The GPU's busy
share is nvidia-smi's: the share of time in which any kernel ran, sampled over the counted steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name, gpu_name
from step_problem import Row, killed_at_the_end, save, show

MODES: dict[str, list[str]] = {
    "sync": ["trainer.mode=sync"],
    "fully async, staleness 1": ["trainer.mode=fully_async", "trainer.max_staleness=1.0"],
}
PARTS = {
    "sync": ("time/produce", "time/update", "time/publish"),
    "fully async, staleness 1": ("time/wait for rows", "time/update/compute", "time/drain", "time/publish"),
}
_SAMPLE_MS = 100


def main() -> None:
    options = _options()
    hardware = gpu_name() if torch.cuda.is_available() else cpu_name()
    rows: list[Row] = []
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="understudy-load-") as name:
        for mode, words in MODES.items():
            found = _run(Path(name) / mode.partition(",")[0].replace(" ", "-"), mode, words, options)
            if not found:
                continue
            lines, busy = found
            rows += _rows(options.label, mode, lines, busy, rates)
            print(*map(show, rows), sep="\n", flush=True)
            save("user_load", hardware, rows, options.out)


def _rows(
    label: str, mode: str, lines: Sequence[Mapping[str, Any]], busy: Sequence[float], rates: dict[str, float]
) -> list[Row]:
    tokens = [round(line["response_length/mean"] * line["rollout/rows"]) for line in lines]
    seconds = [line["time/step"] for line in lines]
    rates[mode] = sum(tokens) / sum(seconds)
    row = Row(f"{label}: {mode}", round(rates[mode], 1), "completion tokens/s")
    if mode != "sync" and "sync" in rates:
        row.peer, row.peer_value = "sync, same run", round(rates["sync"], 1)
        row.ratio = round(rates[mode] / rates["sync"], 3)
    rows = [row, Row(f"{row.name}, step", round(median(seconds), 3), "s")]
    if busy:
        rows.append(Row(f"{row.name}, GPU busy", round(mean(busy) / 100, 3), "share of time"))
    keys = [(part, "s of a step") for part in PARTS[mode]]
    keys += [
        ("response_length/mean", "tokens"),
        ("response_length/max", "tokens"),
        ("response_length/clip_ratio", "share"),
    ]
    found = [(key, unit, [line[key] for line in lines if key in line]) for key, unit in keys]
    rows += [
        Row(f"{row.name}, {key.removeprefix('time/')}", round(median(values), 4), unit)
        for key, unit, values in found
        if values
    ]
    return rows


def _run(
    run: Path, mode: str, words: Sequence[str], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[float]] | None:
    """(metrics of the counted steps, the GPU's busy share in percent while they ran); None if there are none."""
    more = 4 if mode != "sync" else 0  # engines and trainer stay busy until the last counted step
    keys = [
        f"run.dir={run}",
        f"trainer.steps={options.steps + more}",
        "trainer.checkpoint_every=100000",
        "trainer.eval_samples=1",
    ]
    command = [
        sys.executable,
        "-m",
        "understudy.cli.main",
        "train",
        "--quiet",
        str(options.recipe),
        *options.overrides,
        *keys,
        *words,
    ]
    metrics, busy, begun = run / "metrics.jsonl", [], time.monotonic()
    log = run.with_suffix(".log")
    with log.open("w") as sink, Sampler() as sampler:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        counting = False
        with killed_at_the_end(process):
            while process.poll() is None and time.monotonic() - begun < options.limit:
                done = _steps(metrics)
                if not counting and done >= options.skip:
                    sampler.values.clear()
                    counting = True
                if done >= options.steps:
                    break
                time.sleep(0.05)
            busy = list(sampler.values) if counting else []
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    lines = [line for line in lines if options.skip < line["step"] <= options.steps and "time/step" in line]
    print(f"{mode}: {len(lines)} counted steps in {time.monotonic() - begun:.0f} s", flush=True)
    if lines:
        return lines, busy
    print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), flush=True)
    return None


def _steps(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return max((json.loads(line)["step"] for line in lines[-1:]), default=0)


class Sampler:
    """nvidia-smi's utilization, as a thread reads it; no values without it."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Sampler:
        if smi := shutil.which("nvidia-smi"):
            words = [
                smi,
                "--query-gpu=utilization.gpu",
                "--format=csv,noheader,nounits",
                f"-lms={_SAMPLE_MS}",
            ]
            self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.values.append(float(line))

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--label", default="GSM8K, 1.5B")
    parser.add_argument("--skip", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one mode")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
