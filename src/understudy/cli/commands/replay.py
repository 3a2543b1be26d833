"""Run the rows of a refused step again, one by one, and say which of them are not finite."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from understudy.observability.redact import printable
from understudy.observability.rundir import RunDir

EXAMPLE = "understudy replay runs/RUN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument(
        "--step", type=int, help="steps behind the refused one; the last refusal when not given"
    )


def run(options: argparse.Namespace) -> int:
    RunDir.open(options.run).refused_step(options.step)  # a refusal before torch is imported
    from understudy.run.replay import replay_run

    found = replay_run(options.run, options.step)
    console = Console()

    def say(text: str) -> None:
        console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    say(f"refused    {found.refused.reason}")
    say(
        f"weights    of step {found.weights_of}, those the {found.role} had"
        if found.same_weights
        else f"weights    of step {found.weights_of}: the {found.role}'s own, after {found.refused.step} steps, were not saved"
    )
    for row in found.findings:
        columns = f"; not finite: {', '.join(row.broken_columns)}" if row.broken_columns else ""
        verdict = "sound" if row.sound else "BROKEN"
        say(f"{verdict:<10} {row.key}  loss {row.loss:.6g}  gradient norm {row.grad_norm:.6g}{columns}")
    broken = sum(not row.sound for row in found.findings)
    say(f"{broken} of {len(found.findings)} rows broken")
    return 1 if broken else 0
