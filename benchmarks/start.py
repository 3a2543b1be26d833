"""How long the quickstart takes: to its first step, and to its end; how long any recipe takes to its first step.

    python benchmarks/start.py            about 5 minutes on two cores
    python benchmarks/start.py --no-end   starts alone
    python benchmarks/start.py --recipe recipes/gsm8k/qwen/forward-kl.toml student.compile=true …   on a GPU

A start counts from the command to the first line of metrics.jsonl that has a step. Its floor, a process that imports
torch and transformers, takes turns with it. The medians count.

With `--recipe` the first start fills the caches (files, compiled code) and is a row of its own; the later ones have the
goal. The parts of a start are the lines that the command prints, by the time at which they came, and the spans of step 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hardware import cpu_name, gpu_name
from step_problem import Row, killed_at_the_end, save, show

START_GOAL_S, END_GOAL_S, GPU_GOAL_S = 12.0, 120.0, 30.0
_DEADLINE_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--no-end", action="store_true", help="do not measure a whole quickstart")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--recipe", type=Path, help="measure the start of this recipe instead")
    parser.add_argument(
        "--label", default="1.5B", help="name of the recipe in the result file, with --recipe"
    )
    parser.add_argument(
        "--filled", action="store_true", help="an earlier run filled the caches: the first start counts"
    )
    parser.add_argument("--limit", type=float, default=_DEADLINE_S, help="seconds for one start")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="with --recipe")
    options = parser.parse_intermixed_args()
    os.environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # an installed package has its bytecode from the first start on
    if options.recipe is not None:
        start_of_a_recipe(options)
        return
    load = os.getloadavg()[0]
    starts, floors = [], []
    with tempfile.TemporaryDirectory(prefix="understudy-start-") as folder:
        for n in range(options.starts + 1):  # the first one fills the caches of the file system
            found = to_the_first_step(Path(folder) / f"run-{n}"), imports()
            print(f"start {n}: {found[0]:.2f} s, imports alone {found[1]:.2f} s", flush=True)
            if n:
                starts.append(found[0])
                floors.append(found[1])
        start, floor = statistics.median(starts), statistics.median(floors)
        rows = [
            Row("quickstart: command to the first step", round(start, 2), "s", "imports of torch and transformers",
                round(floor, 2), round(start / floor, 2), f"<= {START_GOAL_S:.0f} s", start <= START_GOAL_S),
            Row("quickstart: command to the first step, slowest", round(max(starts), 2), "s"),
            Row("load average of the machine before, 1 minute", round(load, 2), "processes"),
        ]  # fmt: skip
        if not options.no_end:
            end = to_the_end(Path(folder) / "whole")
            rows.append(
                Row("quickstart: command to its end, 200 steps", round(end, 1), "s",
                    goal=f"<= {END_GOAL_S:.0f} s", met=end <= END_GOAL_S)
            )  # fmt: skip
    for row in rows:
        print(f"{row.name:<50} {row.value} {row.unit} {row.goal} {'' if row.met is None else row.met}")
    save("start", cpu_name(), rows, options.out)


def start_of_a_recipe(options: argparse.Namespace) -> None:
    hardware = gpu_name() if torch.cuda.is_available() else cpu_name()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="understudy-start-") as folder:
        for n in range(1 if options.filled else 0, options.starts + 1):
            parts = parts_of_a_start(
                Path(folder) / f"run-{n}", options.recipe, options.overrides, options.limit
            )
            if not parts:
                continue
            name = f"{options.label}: command to the end of the first step"
            name += ", caches filled" + f", start {n}" * (n > 1) if n else ", caches as they were"
            row = Row(name, round(sum(parts.values()), 2), "s")
            if n:
                row.goal, row.met = f"<= {GPU_GOAL_S:.0f} s", row.value <= GPU_GOAL_S
            rows += [
                row,
                *(Row(f"{name}: {part}", round(value, 2), "s of a start") for part, value in parts.items()),
            ]
            print(*map(show, rows[-1 - len(parts) :]), sep="\n", flush=True)
            save("start_recipe", hardware, rows, options.out)


def parts_of_a_start(run: Path, recipe: Path, overrides: Sequence[str], limit: float) -> dict[str, float]:
    """Seconds between the marks of one start, in order. It is stopped after its first step, or after `limit`."""
    begun = time.time()
    command = [
        sys.executable,
        "-m",
        "understudy.cli.main",
        "train",
        str(recipe),
        f"run.dir={run}",
        *overrides,
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=_read_lines, args=(process, lines), daemon=True)
    reader.start()
    with killed_at_the_end(process):
        while not _has_a_step(run / "metrics.jsonl"):
            if process.poll() is not None or time.time() - begun > limit:
                print(*(f"{at - begun:7.2f} {text}" for at, text in lines[-25:]), sep="\n", flush=True)
                print(
                    f"{recipe} made no step in {time.time() - begun:.0f} s; its status is {process.poll()}",
                    flush=True,
                )
                return {}
            time.sleep(0.02)
        end = time.time()
    marks = [
        (at - begun, text) for at, text in lines if text.startswith(("run directory", "loading", "starting"))
    ]
    marks += _marks_of_the_step(run / "spans.jsonl", begun)
    shown: dict[str, float] = {}
    before, name = 0.0, "imports and checks"
    for at, text in [*sorted(marks), (end - begun, "")]:
        if at >= before:
            shown[name] = shown.get(name, 0.0) + at - before
            before, name = at, text.split(" /")[0][:60]
    return shown


def _read_lines(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert process.stderr is not None
    lines.extend((time.time(), line.strip()) for line in process.stderr)


def _marks_of_the_step(path: Path, begun: float) -> list[tuple[float, str]]:
    """When the parts of step 1 began."""
    if not path.exists():
        return []
    spans = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    at = next((span["at"] for span in spans if span["name"] == "launch"), begun) - begun
    first = {
        name: [span for span in spans if span["name"] == name]
        for name in ("produce", "rollout", "score", "update")
    }
    marks = [(at, "evaluation before the first step")]
    if first["produce"]:
        started = first["produce"][0]["start"]
        marks.append((at + started, "rollouts of step 1"))
        if scored := [span["start"] for span in first["score"] if span["start"] >= started]:
            written = max(
                (span["end"] for span in first["rollout"] if span["end"] <= first["produce"][0]["end"]),
                default=min(scored),
            )
            marks.append((at + max(min(scored), written), "scores of step 1 after the last rollout"))
    if first["update"]:
        marks.append((at + first["update"][0]["start"], "update of step 1"))
        marks.append((at + first["update"][0]["end"], "publish, metrics"))
    return marks


def to_the_first_step(run: Path) -> float:
    begun = time.monotonic()
    process = subprocess.Popen(_quickstart(run), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while not _has_a_step(run / "metrics.jsonl"):
            if process.poll() is not None or time.monotonic() - begun > _DEADLINE_S:
                sys.exit(f"the quickstart in {run} made no step; its status is {process.poll()}")
            time.sleep(0.02)
        return time.monotonic() - begun
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _has_a_step(metrics: Path) -> bool:
    """The first line may be that of the evaluation before the first step."""
    if not metrics.exists():
        return False
    whole = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return any(json.loads(line)["step"] >= 1 for line in whole)


def to_the_end(run: Path) -> float:
    begun = time.monotonic()
    subprocess.run(_quickstart(run), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - begun


def imports() -> float:
    begun = time.monotonic()
    code = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer"
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.monotonic() - begun


def _quickstart(run: Path) -> list[str]:
    return [sys.executable, "-m", "understudy.cli.main", "quickstart", f"run.dir={run}"]


if __name__ == "__main__":
    main()
