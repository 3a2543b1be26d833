"""Runs with agent loops in worker processes: equal metrics, failing sessions, killed workers, time metrics."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import understudy
from understudy.observability.metrics import without_clock


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_session_whose_agent_loop_raises_or_hangs_becomes_a_dead_letter(
    recipe: Callable[..., dict[str, Any]], workers: int
) -> None:
    options = {"troubled_loop:Troubled": {"raises": [1, 5], "hangs": [6]}}
    table = recipe(
        rollout__agent="troubled_loop:Troubled",
        rollout__agent_options=options,
        rollout__workers=workers,
        rollout__deadline_seconds=4.0,
        data__shuffle=False,
        trainer__steps=1,
        trainer__batch_size=12,
        trainer__max_dead_letters=0.5,
    )
    run = understudy.train(table, progress=False)
    letters = [
        json.loads(line)
        for path in run.dir.rglob("dead_letters.jsonl")
        for line in path.open()
        if line.strip()
    ]
    reasons = {letter["key"]: letter["reason"] for letter in letters}
    assert {key: "the environment broke" in reason for key, reason in reasons.items()} == {
        "00000-0000001_0_0": True,
        "00000-0000005_0_0": True,
        "00000-0000006_0_0": False,
    }
    late = "00000-0000006_0_0"
    assert reasons[late] == f"agent loop timed out: {late} took longer than rollout.deadline_seconds = 4"
    assert run.last["rollout/rows"] == 9, "the others are trained"


@pytest.mark.slow
def test_a_run_with_workers_has_the_metrics_of_a_run_without(recipe: Callable[..., dict[str, Any]]) -> None:
    here = understudy.train(recipe("here", trainer__steps=2), progress=False)
    there = understudy.train(recipe("there", trainer__steps=2, rollout__workers=2), progress=False)
    assert [without_clock(line) for line in there.metrics] == [without_clock(line) for line in here.metrics]


@pytest.mark.slow
def test_workers_killed_during_a_generation_do_not_change_the_metrics(
    recipe: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker process dies at its 15th answer, in the middle of an agent's turns. Its sessions begin again
    and get the generations that they already had: the engine's batches, and so the last digits of logprobs, do
    not change."""
    paths = [str(Path(__file__).parents[2] / "ray"), *sys.path]
    monkeypatch.setattr(sys, "path", paths)
    turns = {"rollout__agent": "two_turns:TwoTurns", "trainer__steps": 1, "trainer__batch_size": 16}
    here = understudy.train(recipe("here", **turns), progress=False)
    monkeypatch.setenv("UNDERSTUDY_FAULT", "worker.answered:15")
    there = understudy.train(recipe("there", rollout__workers=2, **turns), progress=False)
    assert "_0_0 is begun again" in (there.dir / "logs" / "trainer.log").read_text()
    assert [without_clock(line) for line in there.metrics] == [without_clock(line) for line in here.metrics]


def test_a_step_s_metrics_report_the_time_of_each_rollout_activity(
    recipe: Callable[..., dict[str, Any]],
) -> None:
    line = understudy.train(recipe(trainer__steps=1), progress=False).last
    for activity in ("generate", "loop", "reward", "score"):
        low, mean, high = (line[f"time/rollout/{activity}/{name}"] for name in ("min", "mean", "max"))
        assert 0 < low <= mean <= high
    assert line["time/rollout/generate/max"] <= line["time/rollout/loop/max"]
    assert line["time/rollout/slowest/key"].startswith("00000-")
    assert line["time/rollout/slowest/score"] > 0
    assert line["time/rollout/slowest/prompt_length"] > 0
    assert 0 < line["time/rollout/slowest/response_length"] <= line["response_length/max"]
