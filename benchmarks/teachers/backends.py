"""A recipe's teacher as native replicas, then as vLLM servers that the run starts: the same step 1, and the time of scoring.

    python benchmarks/teachers/backends.py recipes/gsm8k/qwen/forward-kl.toml [key=value …]       about 150 s on an H200

Both runs are `understudy train` in sync mode with one seed, so step 1 has the same prompts and weights. vLLM is that of
UNDERSTUDY_VLLM_PYTHON. A run that shares its GPU leaves vLLM the share of --memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name, gpu_name
from step_problem import Row, killed_at_the_end, save, show

CLOSE = 0.02
"""Losses of step 1 may differ by this share: scores in bfloat16 are rounded in different places."""
LOSS, SCORING = "actor/distillation/loss", "time/score"


def main() -> None:
    options = _options()
    server = [
        f"teachers.{options.teacher}.backend=vllm",
        f"teachers.{options.teacher}.context_length={options.context}",
        f'teachers.{options.teacher}.engine_args=["--gpu-memory-utilization={options.memory}"]',
        "cluster.start_timeout_seconds=400",
    ]
    with tempfile.TemporaryDirectory(prefix="understudy-backends-") as name:
        found = {
            backend: _train(Path(name) / backend, words, options)
            for backend, words in (("native", []), ("vllm", server))
        }
    rows = [
        row
        for backend, lines in found.items()
        if lines
        for row in (
            Row(f"{backend}: distillation loss of step 1", round(lines[0][LOSS], 5), "nats"),
            Row(f"{backend}: scoring", round(median(line[SCORING] for line in lines[1:] or lines), 3), "s of a step"),
            Row(f"{backend}: step", round(median(line["time/step"] for line in lines[1:] or lines), 3), "s"),
        )
    ]  # fmt: skip
    if all(found.values()):
        native, server_loss = (found[backend][0][LOSS] for backend in ("native", "vllm"))
        apart = server_loss / native - 1
        rows.append(
            Row("vllm: distillation loss of step 1 beside native", round(server_loss, 5), "nats", "native", round(native, 5),
                round(server_loss / native, 4), f"within {CLOSE:.0%}", abs(apart) <= CLOSE)
        )  # fmt: skip
    print(*map(show, rows), sep="\n", flush=True)
    if rows:
        save("teacher_backends", gpu_name() if torch.cuda.is_available() else cpu_name(), rows, options.out)


def _train(run: Path, words: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    keys = [f"run.dir={run}", f"trainer.steps={options.steps}", "trainer.eval_samples=1"]
    keys += ["trainer.checkpoint_every=100000", f"trainer.eval_every={options.steps}"]
    command = [sys.executable, "-m", "understudy.cli.main", "train", "--quiet", str(options.recipe)]
    metrics, begun, log = run / "metrics.jsonl", time.monotonic(), run.with_suffix(".log")
    lines: list[dict[str, Any]] = []
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, *options.overrides, *keys, *words], stdout=sink, stderr=subprocess.STDOUT
        )
        with killed_at_the_end(process):
            while len(lines) < options.steps and time.monotonic() - begun < options.limit:
                ended = process.poll() is not None
                lines = _steps(metrics)
                if ended:
                    break
                time.sleep(0.1)
    print(f"{run.name}: {len(lines)} steps in {time.monotonic() - begun:.0f} s", flush=True)
    if not lines:
        print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), flush=True)
    return lines


def _steps(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    whole = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in map(json.loads, whole) if LOSS in line and SCORING in line]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--teacher", default="teacher", help="name of the teacher in the recipe")
    parser.add_argument("--context", type=int, default=720)
    parser.add_argument("--memory", type=float, default=0.2, help="vLLM's share of the GPU's memory")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=240, help="seconds for one run")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
