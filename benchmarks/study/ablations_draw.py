"""Tables, picture and result file of ablations.py.

    python benchmarks/study/ablations_draw.py --recipe quickstart runs/ablations --hardware CPU-OR-GPU
    python benchmarks/study/ablations_draw.py --recipe quickstart benchmarks/results/ablations-quickstart-….json

From the folder of the runs it writes the result file; from a result file it draws again. A case appears when all its collected seeds have
reached its last step. Lines are means over seeds, bands reach from the lowest to the highest, ± is the standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from ablations import HERE, Table, read_table
from study_draw import curve, spread
from study_jobs import ROOT, read_lines

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from step_problem import Row

COLUMNS = {
    "entropy": ("entropy", "{:.2f}"),
    "length": ("tokens", "{:.2f}"),
}
"""Of every table, besides accuracy and KL; entropy and tokens are those of the samples since the evaluation before the last."""
ADDED = {
    "tail": {"student_mass": ("student's mass on the K", "{:.3f}")},
    "staleness": {"staleness": ("mean age of rows", "{:.2f}")},
    "methods": {"turns": ("turns", "{:.2f}")},
    "schedule": {"turns": ("turns", "{:.2f}"), "staleness": ("mean age of rows", "{:.2f}")},
    "teachers": {
        "accuracy/add": ("right sums", "{:.1%}"),
        "accuracy/sort": ("right orders", "{:.1%}"),
        "accuracy/past": ("right past tenses", "{:.1%}"),
        "accuracy/order": ("right orders", "{:.1%}"),
    },
}
"""Of single groups, where their runs have them."""
DETAIL = (("tail", "student_mass"), ("tail", "entropy"))
LABELS = {
    "accuracy": "accuracy on held-out problems",
    "student_mass": "student's mass on the K tokens",
    "entropy": "entropy of the student (nats)",
}
COLOURS = ("#222222", "#c44e52", "#4878a8", "#55a868", "#dd8452", "#8172b3", "#937860")

Runs = list[dict[str, Any]]


def read_runs(path: Path) -> Runs:
    """The collected runs, each with its KL at the steps it was graded at."""
    if path.is_file():
        runs: Runs = json.loads(path.read_text())["runs"]
        return runs
    graded = {(line["run"], line["step"]): line["kl"] for line in read_lines(path / "grades.jsonl")}
    found = read_lines(path / "collected.jsonl")
    for run in found:
        for point in run["points"]:
            own = graded.get((run["name"], point["step"]))
            point["kl"] = own if own is not None or point["step"] else graded.get(("start", 0))
    return found


def of_cases(table: Table, group: str, runs: Sequence[dict[str, Any]]) -> dict[str, Runs]:
    """Case → the runs of its seeds; only cases with runs, and none where there is nothing to compare."""
    cases = table.groups[group].items()
    found = {case: [run for run in runs if run["own"] == list(own)] for case, own in cases}
    found = {case: seeds for case, seeds in found.items() if seeds}
    return found if len(found) > 1 else {}


def last(runs: Runs, quantity: str) -> list[float] | None:
    """The seeds' values at the last step they all have; None where not all of them know it there."""
    return curve(runs, quantity).get(max(curve(runs, "accuracy")))


def markdown(table: Table, group: str, cases: Mapping[str, Runs]) -> list[str]:
    columns = {
        quantity: column
        for quantity, column in {**COLUMNS, **ADDED.get(group, {})}.items()
        if any(last(runs, quantity) for runs in cases.values())
    }
    first, *others = (curve(runs, "accuracy") for runs in cases.values())
    steps = [step for step in first if all(step in accuracy for accuracy in others)]
    shown = dict.fromkeys((steps[len(steps) // 2], steps[-1]))  # one column where only the last is common
    early, *late = shown
    head = ["", "seeds", f"accuracy after {early} steps, %", *(f"after {step}" for step in late)]
    head += ["KL to the teacher"] if table.graded else []
    head += [label for label, _ in columns.values()]
    lines = [f"**{table.questions[group]}**", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for case, runs in cases.items():
        accuracy = curve(runs, "accuracy")
        shares = [[100 * value for value in accuracy[step]] for step in shown]
        cells = [
            case,
            str(len(runs)),
            *(_spread(values, 1) for values in shares),
            *([_spread(last(runs, "kl"), 3)] if table.graded else []),
        ]
        for quantity, (_, pattern) in columns.items():
            values = last(runs, quantity)
            cells.append(pattern.format(mean(values)) if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _spread(values: Sequence[float] | None, digits: int) -> str:
    """Mean and standard deviation over seeds; of one seed its value."""
    if not values:
        return ""
    return f"{mean(values):.{digits}f}" + (f" ± {spread(values):.{digits}f}" if len(values) > 1 else "")


def rows_of(table: Table, group: str, cases: Mapping[str, Runs]) -> list[Row]:
    """Accuracy and KL at the end of each case beside the group's first."""
    rows, (first, *_) = [], cases
    for case, runs in cases.items():
        for quantity, unit in (("accuracy", "share right"), ("kl", "nats a token")):
            values, peers = last(runs, quantity), last(cases[first], quantity)
            if not values or not peers:
                continue
            step = max(curve(runs, "accuracy"))
            name = f"{group}: {case}: {quantity} after {step} steps, mean of {len(values)} seeds"
            value, peer = mean(values), mean(peers)
            rows.append(
                Row(
                    name,
                    round(value, 4),
                    unit,
                    first,
                    round(peer, 4),
                    round(value / peer, 3) if peer else None,
                )
            )
            rows.append(Row(f"{name}, standard deviation over seeds", round(spread(values), 4), unit))
    return rows


def draw(table: Table, runs: Runs, picture: Path) -> None:
    mpl.use("Agg")
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    drawn = [group for group in table.groups if of_cases(table, group, runs)]
    wanted = [(group, "accuracy") for group in drawn]
    wanted += [(group, quantity) for group, quantity in DETAIL if group in drawn]
    figure, axes = plt.subplots(
        (len(wanted) + 1) // 2, 2, figsize=(11, 3.9 * ((len(wanted) + 1) // 2)), squeeze=False
    )
    for panel in axes.flat[len(wanted) :]:
        panel.set_visible(False)
    for panel, (group, quantity) in zip(axes.flat, wanted, strict=False):
        for (case, seeds), colour in zip(of_cases(table, group, runs).items(), COLOURS, strict=False):
            points = curve(seeds, quantity)
            if not points:
                continue
            lows, highs = [min(one) for one in points.values()], [max(one) for one in points.values()]
            means = [mean(one) for one in points.values()]
            panel.plot(list(points), means, "o-", color=colour, markersize=3, linewidth=1.4, label=case)
            panel.fill_between(list(points), lows, highs, color=colour, alpha=0.15, linewidth=0)
        panel.set_title(f"{group}: {table.questions[group]}", loc="left", fontsize=10)
        panel.set(xlabel="steps", ylabel=LABELS[quantity], ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    print(f"wrote {picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, help="the folder of ablations.py, or a result file")
    parser.add_argument("--cases", type=Path, default=HERE / "ablations.toml")
    parser.add_argument("--recipe", default="quickstart", help="a table of --cases")
    parser.add_argument("--hardware", default="unnamed", help="of the runs; part of the result file's name")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--picture", type=Path, help="docs/images/ablations-RECIPE.png when not set")
    options = parser.parse_args()
    table, runs = read_table(options.cases, options.recipe), read_runs(options.runs)
    groups = {group: cases for group in table.groups if (cases := of_cases(table, group, runs))}
    print("\n".join(line for group, cases in groups.items() for line in markdown(table, group, cases)))
    draw(table, runs, options.picture or ROOT / "docs" / "images" / f"ablations-{options.recipe}.png")
    if options.runs.is_dir():
        rows = [asdict(row) for group, cases in groups.items() for row in rows_of(table, group, cases)]
        name = f"ablations-{options.recipe}-{options.hardware}-{time.strftime('%Y-%m-%d')}.json"
        (options.results / name).write_text(json.dumps({"rows": rows, "runs": runs}, indent=1) + "\n")
        print(f"wrote {options.results / name}")


if __name__ == "__main__":
    main()
