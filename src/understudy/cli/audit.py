"""Prove a run's accounting from its journal: issued = trained + dead-lettered + in flight, no key twice."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from understudy.observability.rundir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory")


def run(options: argparse.Namespace) -> int:
    from understudy.dataplane.ledger import audit

    report = audit(RunDir.open(options.run).journal)
    console = Console()
    for name, value in report.lines():
        console.print(f"{name:<14} {value}", highlight=False)
    console.print("[green]the accounts balance[/]" if report.balanced else "[red]the accounts do NOT balance[/]")
    return 0 if report.balanced else 1
