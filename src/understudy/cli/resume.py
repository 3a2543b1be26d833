"""Continue a run that was stopped or killed, from its last checkpoint."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from understudy.cli.outcome import finish


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def run(options: argparse.Namespace) -> int:
    from understudy.trainers.launch import resume

    return finish(asyncio.run(resume(options.run, progress=not options.quiet)))
