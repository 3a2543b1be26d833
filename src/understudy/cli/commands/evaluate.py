"""Measure a model, or the latest checkpoint of a run, on held-out problems."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from understudy.observability.live import LiveView
from understudy.run.entry import run_to_its_end
from understudy.run.measurable import check_measurable

EXAMPLE = "understudy eval runs/RUN --best"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run directory, a model folder, or a hub id")
    parser.add_argument("--data", type=Path, help="jsonl or parquet; a run's own data.eval when not given")
    parser.add_argument(
        "--reward",
        help="module:function, also of a module in this folder; a run's own data.reward when not given",
    )
    parser.add_argument("--max-new-tokens", type=int, help="a run's own, or 256")
    parser.add_argument(
        "--agent",
        help="single_turn, tool, verifiers or module:Class; a run's own rollout.agent when not given",
    )
    parser.add_argument("--samples", type=int, help="how many problems; all when not given")
    parser.add_argument(
        "--k",
        type=int,
        help="samples per problem besides the greedy answer; a run's own trainer.eval_k, or 0",
    )
    parser.add_argument("--best", action="store_true", help="a run's best checkpoint instead of its latest")


def run(options: argparse.Namespace) -> None:
    check_measurable(options.model, options.data, options.reward, best=options.best)
    from understudy.run.evaluate_model import evaluate_model

    with LiveView(0) as view:
        results = run_to_its_end(
            evaluate_model(
                options.model,
                options.data,
                options.reward,
                options.max_new_tokens,
                options.samples,
                options.agent,
                k=options.k,
                best=options.best,
                view=view,
            )
        )
    console = Console()
    for name, value in results.items():
        console.print(f"{name:<32} {value:.4f}", highlight=False, markup=False)
