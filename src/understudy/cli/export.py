"""Write a run's trained student as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("out", type=Path, help="the folder to write; it must not exist or be empty")


def run(options: argparse.Namespace) -> None:
    from understudy.trainers.export import export_run

    out = export_run(options.run, options.out)
    Console().print(
        f"wrote {out}; load it with AutoModelForCausalLM.from_pretrained({str(out)!r})",
        highlight=False,
        soft_wrap=True,
    )
