"""Writes docs/speed.md from the result files: goals, measurements, and where a step's time goes.

python docs/reference/speed_page.py            writes docs/speed.md
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PAGE = Path(__file__).parents[1] / "speed.md"
INTRO = """# Speed

`docs/reference/speed_page.py` writes this page from the files in `benchmarks/results`, with the newest file of each benchmark
and machine. Every row of the tables has a goal and compares a measurement with a peer, or with a lower bound, measured in the
same run. Rows without a goal are left out, except for the parts of a step. A goal is open if the 95 % interval of a
measurement includes it. [Experiments](experiments.md) and [fully async](async.md) describe what was tried, and why some
goals are missed. `python benchmarks/one_gpu/suite.py` runs the benchmarks for one GPU one after another, in pieces of
limited length.
"""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    files: str
    """The beginning of a result file's name; the newest by date is read."""
    command: str
    only: str = ""
    """A pattern for the rows shown; all that have a goal unless set."""
    besides: str = ""
    """A pattern for the units of rows that are shown without a goal, such as the parts of a step."""


SECTIONS = (
    Section("A whole sync step on a GPU", "step-nvidia", "python benchmarks/step.py", besides="of a step"),
    Section("Cost of determinism = full on a GPU", "determinism-nvidia", "python benchmarks/step.py --determinism", besides="of a step"),
    Section("An update of the student on a GPU", "update-nvidia", "python benchmarks/one_gpu/update_profile.py", besides="of an update"),
    Section("Rows of 32,000 tokens on one GPU", "long_context-nvidia", "python benchmarks/one_gpu/long_context.py TEACHER STUDENT TRAIN.jsonl", besides="of a step"),
    Section("A whole sync step on a CPU", "step_cpu", "python benchmarks/step_cpu.py", besides="of a step"),
    Section("Start and end of the quickstart", "start", "python benchmarks/start.py"),
    Section("Start of the 1.5B recipe on a GPU, compile caches filled", "start_recipe-nvidia", "python benchmarks/start.py --recipe recipes/gsm8k/qwen/forward-kl.toml --filled --starts 2", besides="of a start"),
    Section("Fully async on one GPU", "async-nvidia", "python benchmarks/async.py --gpu --systems trl --mps --every 1 --kv-cache model fp8 --publish keep drain", besides="of a step"),
    Section("Fully async on a CPU, rollouts with long-tailed lengths", "async-aarch64", "python benchmarks/async.py"),
    Section("Losses on a GPU", "losses-nvidia", "python benchmarks/losses/losses.py", only=r"(top-64|full) forward KL: "),
    Section("Losses on a CPU", "losses-cpu", "python benchmarks/losses/losses_cpu.py"),
    Section("Teacher scoring on a GPU", "scoring-nvidia", "python benchmarks/scoring.py", only="delivered"),
    Section("Teacher scoring on a CPU", "scoring-cpu", "python benchmarks/scoring.py --cpu"),
    Section("Rollouts on a GPU", "rollout-nvidia", "python benchmarks/rollout/rollout.py"),
    Section("Rollouts of a public workload on a GPU", "public_load-nvidia", "python benchmarks/rollout/public_load.py"),
    Section("Predictions of the simulation and measurements on a GPU", "simulation-nvidia", "python benchmarks/simulation.py"),
    Section("Weights between processes", "weights", "python benchmarks/weights.py", besides="."),
    Section("The trainer's cost per generation of a remote worker", "worker_tokens", "python benchmarks/rollout/worker_tokens.py"),
    Section("The data plane", "dataplane", "python benchmarks/dataplane.py"),
    Section("The data plane with up to 1,000,000 rows held", "dataplane_held", "python benchmarks/dataplane.py --held"),
    Section("The page on a run of 100,000 rows", "viewer-aarch64", "python benchmarks/viewer.py", besides="of a core|processes"),
    Section("Cost of an open page for a trainer, on two idle cores", "viewer_trainer", "python benchmarks/viewer.py --only-trainer", besides="of a core|processes"),
    Section("What keeping rows costs a step, on a CPU", "keep_rows-aarch64", "python benchmarks/step_cpu.py --keep-rows"),
    Section("What keeping rows costs a step, on a GPU", "keep_rows-nvidia", "python benchmarks/keep_rows_cost.py 2 cpu.json train recipes/gsm8k/qwen/forward-kl.toml"),
    Section("Eight-bit teachers on a GPU", "teacher_bits-nvidia", "python benchmarks/teachers/bits.py MODEL TEXT.jsonl --device cuda --dtype bfloat16 --bits fp8"),
)  # fmt: skip


def page() -> str:
    return "\n".join([INTRO, *map(_section, SECTIONS)])


def _section(section: Section) -> str:
    newest = max(RESULTS.glob(f"{section.files}-*.json"), key=lambda path: path.stem[-10:])
    found = json.loads(newest.read_text())
    rows = found if isinstance(found, list) else found["rows"]
    goals = [row for row in rows if row.get("goal") and re.search(section.only, row["name"])]
    lines = [f"## {section.title}", "", f"`{section.command}`, {newest.name}", ""]
    if goals:
        lines += [
            "| measurement | value | beside | ratio | goal | |",
            "|---|---|---|---|---|---|",
            *map(_goal, goals),
            "",
        ]
    besides = [row for row in rows if section.besides and re.search(section.besides, row["unit"])]
    if besides:
        lines += ["| part | value |", "|---|---|"]
        lines += [f"| {row['name']} | {_number(row['value'])} {row['unit']} |" for row in besides] + [""]
    return "\n".join(lines)


def _goal(row: dict[str, Any]) -> str:
    beside = f"{row['peer']}: {_number(row['peer_value'])}" if row.get("peer_value") is not None else ""
    ratio = "" if row.get("ratio") is None else f"{row['ratio']:.3g}"
    met = {True: "met", False: "**missed**", None: "open"}[row["met"]]
    return f"| {row['name']} | {_number(row['value'])} {row['unit']} | {beside} | {ratio} | {row['goal']} | {met} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
