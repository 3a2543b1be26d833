"""Prove a run's accounting from its journal: issued = trained + dead-lettered + evicted + in flight, no key twice."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from understudy.observability.redact import printable
from understudy.observability.rundir import RunDir

EXAMPLE = "understudy audit runs/RUN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory")


def run(options: argparse.Namespace) -> int:
    from understudy.dataplane.ledger import audit

    report = audit(RunDir.open(options.run).path)
    console = Console()
    console.print(printable(str(report)), highlight=False, markup=False, soft_wrap=True)
    kinds: dict[str, list[tuple[str, int]]] = {}
    for reason, count in report.reasons.items():
        kinds.setdefault(reason.partition(":")[0], []).append((reason, count))
    for alike in kinds.values():  # rows are named in reasons: one example of each kind
        example = alike[0][0] if len(alike) == 1 else f"{alike[0][0]} (the first of {len(alike)} reasons)"
        total = sum(count for _, count in alike)
        console.print(f"{total} × {printable(example)}", highlight=False, markup=False, soft_wrap=True)
    return 0 if report.balanced else 1
