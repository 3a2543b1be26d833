"""The framework and the one-file example (examples/minimal_opd.py) give the same losses, step by step."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import ASSETS

import understudy

EXAMPLE = Path(__file__).parents[3] / "examples" / "minimal_opd.py"
STEPS, BATCH, RATE = 4, 16, 1e-3


@pytest.fixture(scope="module")
def oracle() -> list[dict[str, Any]]:
    models = ASSETS / "models"
    command = [
        sys.executable, str(EXAMPLE), "--student", str(models / "student"),
        "--teacher", f"add={models / 'teacher-add'}", "--teacher", f"sort={models / 'teacher-sort'}",
        "--data", str(ASSETS / "data" / "train.jsonl"),
        "--steps", str(STEPS), "--batch-size", str(BATCH), "--learning-rate", str(RATE),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in the run that it is compared with
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_losses_and_gradient_norms_equal_those_of_minimal_opd_in_every_step(
    oracle: list[dict[str, Any]], recipe: Callable[..., dict[str, Any]]
) -> None:
    table = recipe(
        data__shuffle=False, trainer__steps=STEPS, trainer__batch_size=BATCH, trainer__learning_rate=RATE
    )
    run = understudy.train(table, progress=False)
    assert [line["step"] for line in run.metrics] == [line["step"] for line in oracle]
    for ours, theirs in zip(run.metrics, oracle, strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["actor/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["response_length/mean"] * BATCH == pytest.approx(theirs["tokens"])
    assert oracle[-1]["loss"] != pytest.approx(oracle[0]["loss"], rel=1e-3), (
        "the loss should change over the steps"
    )


def test_minimal_opd_is_below_200_lines_and_does_not_use_understudy() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 200 and "understudy" not in text.split('"""')[2]
