"""Measure a model, or the latest checkpoint of a run, on held-out problems."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run directory, a model folder, or a hub id")
    parser.add_argument("--data", type=Path, help="jsonl or parquet; a run's own data.eval when not given")
    parser.add_argument("--reward", help="module:function; a run's own data.reward when not given")
    parser.add_argument("--max-new-tokens", type=int, help="a run's own, or 256")
    parser.add_argument("--samples", type=int, help="how many problems; all when not given")


def run(options: argparse.Namespace) -> None:
    from understudy.trainers.evaluate import evaluate_model

    results = asyncio.run(
        evaluate_model(options.model, options.data, options.reward, options.max_new_tokens, options.samples)
    )
    console = Console()
    for name, value in results.items():
        console.print(f"{name:<32} {value:.4f}", highlight=False)
