"""Measure a model, or the latest checkpoint of a run, on held-out problems."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from understudy.errors import ConfigError
from understudy.observability.live import LiveView
from understudy.observability.report import is_share
from understudy.run.entry import run_to_its_end
from understudy.run.harness import check_harness, evaluate_with_harness
from understudy.run.measurable import check_answers, check_measurable

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
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="for a model that is not a run: dtype of its weights; by default float32 (a run has its own)",
    )
    parser.add_argument(
        "--max-batch",
        type=int,
        help="number of answers written at the same time; by default a run's own rollout.max_batch, or 64",
    )
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="write every problem's row with the greedy answer in the column `written` (rollout.off_policy can learn from it)",
    )
    parser.add_argument("--best", action="store_true", help="a run's best checkpoint instead of its latest")
    parser.add_argument(
        "--harness",
        metavar="TASKS",
        help="measure with lm-evaluation-harness instead: its tasks, with commas between (understudy[harness])",
    )
    parser.add_argument(
        "--harness-tasks", type=Path, metavar="FOLDER", help="with --harness: a folder with tasks of your own"
    )


def run(options: argparse.Namespace) -> None:
    if options.harness is not None:
        _show(_by_harness(options))
        return
    if options.harness_tasks is not None:
        raise ConfigError("--harness-tasks is for --harness TASKS, which is not given")
    check_measurable(options.model, options.data, options.reward, best=options.best)
    check_answers(options.answers)
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
                max_batch=options.max_batch,
                dtype=options.dtype,
                best=options.best,
                answers_to=options.answers,
                view=view,
            )
        )
    _show(results)


def _by_harness(options: argparse.Namespace) -> dict[str, float]:
    own = {
        "--data": options.data, "--reward": options.reward, "--agent": options.agent, "--k": options.k,
        "--max-new-tokens": options.max_new_tokens, "--max-batch": options.max_batch, "--dtype": options.dtype, "--answers": options.answers,
    }  # fmt: skip
    given = [flag for flag, value in own.items() if value is not None]
    if given:
        raise ConfigError(f"--harness has problems and measures of its own; leave out {', '.join(given)}")
    tasks = options.harness.split(",")
    check_harness(options.model, tasks, best=options.best)
    with LiveView(0) as view, view.work(f"evaluating on {options.harness}"):
        return evaluate_with_harness(
            options.model,
            tasks,
            best=options.best,
            samples=options.samples,
            task_folder=options.harness_tasks,
        )


def _show(results: dict[str, float]) -> None:
    console = Console()
    for name, value in results.items():
        if name.partition("/")[0] == "accuracy" and not is_share(value):
            name = name.replace("accuracy", "mean reward", 1)
        console.print(f"{name:<32} {value:.4f}", highlight=False, markup=False)
