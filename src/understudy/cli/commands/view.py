"""Open a page on one or several runs: curves, rows, tokens with the teacher's candidates, timeline, advice."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = "understudy view runs/RUN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run directories: live, finished or killed"
    )
    parser.add_argument(
        "--demo", action="store_true", help="a small recorded run that ships with the package"
    )
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--port", type=int, default=None, help="of the page on 127.0.0.1; any free one if not given"
    )


def run(options: argparse.Namespace) -> None:
    from understudy.errors import RunDirectoryError
    from understudy.observability.rundir import RunDir
    from understudy.viewer.serve import demo_run, serve

    # Beside a run that starts now, its folder may not be there yet.
    runs = [RunDir(path) if options.beside else RunDir.open(path) for path in options.runs]
    if options.demo:
        runs.append(demo_run())
    if not runs:
        newest = max(Path("runs").glob("*/recipe.json"), key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            raise RunDirectoryError(
                "no run named, and none under runs/; name a run directory, or give --demo"
            )
        runs = [RunDir(newest.parent)]
    tell = "view    {}" if options.beside else "view    {}\nstop with Ctrl-C"
    serve(runs, options.port, lambda address: print(tell.format(address), flush=True), beside=options.beside)
