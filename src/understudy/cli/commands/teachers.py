"""Look at a running run's teachers, and let replicas join or leave it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXAMPLE = "understudy teachers runs/RUN list"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a live run")
    actions = parser.add_subparsers(dest="do", metavar="ACTION")
    actions.add_parser("list", help="state and counters of every replica (the default)")
    add = actions.add_parser(
        "add",
        help="one more replica; it joins once it has proved to be the same teacher",
        epilog="example: understudy teachers runs/RUN add math",
    )
    add.add_argument("teacher")
    add.add_argument("--url", help="where it answers (external teachers)")
    remove = actions.add_parser(
        "remove",
        help="one replica fewer; it first finishes its running requests",
        epilog="example: understudy teachers runs/RUN remove math 1",
    )
    remove.add_argument("teacher")
    remove.add_argument("replica", help="its name, as `list` shows it")


def run(options: argparse.Namespace) -> None:
    from understudy.assembly.teachers.admin import ask_run

    request: dict[str, Any] = {"do": options.do or "list"}
    request |= {
        name: getattr(options, name) for name in ("teacher", "replica", "url") if getattr(options, name, None)
    }
    answer = ask_run(options.run, request)
    console = Console(markup=False)
    if request["do"] == "list":
        console.print(_table(answer))
    elif request["do"] == "add":
        console.print(
            f"replica {answer['added']} of teacher {options.teacher} joined", highlight=False, markup=False
        )
    else:
        console.print(
            f"replica {answer['removed']} of teacher {options.teacher} left", highlight=False, markup=False
        )


def _table(teachers: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in (
        "teacher",
        "replica",
        "state",
        "share",
        "requests",
        "failed",
        "ejected",
        "restarts",
        "p95",
    ):
        is_text = column in ("teacher", "replica", "state")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for teacher, replicas in teachers.items():
        for one in replicas:
            table.add_row(
                teacher,
                one["name"],
                one["state"],
                f"{one['share']:.0%}",
                *(str(one[name]) for name in ("requests", "failures", "ejections", "restarts")),
                f"{one['latency_p95']:.3f} s",
            )
    return table
