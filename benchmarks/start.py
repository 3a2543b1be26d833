"""How long the quickstart takes: to its first step, and to its end.

    python benchmarks/start.py            about 5 minutes on two cores
    python benchmarks/start.py --no-end   starts alone

A start counts from the command to the first line of metrics.jsonl that has a step. Its floor, a process that imports
torch and transformers, takes turns with it. The medians count.
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
import time
from pathlib import Path

from hardware import cpu_name
from step_problem import Row, save

START_GOAL_S, END_GOAL_S = 12.0, 120.0
_DEADLINE_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--no-end", action="store_true", help="do not measure a whole quickstart")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args()
    os.environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # an installed package has its bytecode from the first start on
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
