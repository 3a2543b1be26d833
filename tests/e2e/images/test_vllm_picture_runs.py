"""Runs that start vLLM (named by UNDERSTUDY_VLLM_PYTHON) as their engine or as their vision teacher."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_image_runs import changed_weights, table_of, train
from vision_models import make_model

from understudy.observability.metrics import read_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture
def python() -> str:
    found = os.environ.get("UNDERSTUDY_VLLM_PYTHON")
    if not found:
        pytest.skip("UNDERSTUDY_VLLM_PYTHON names no Python with vllm")
    if subprocess.run([found, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        pytest.skip(f"{found} has no torchvision, without which vLLM reads no pictures")
    return found


def test_vllm_engine_logprobs_equal_the_trainer_s_with_a_trained_vision_tower(
    tmp_path: Path, python: str
) -> None:
    """Trained weights of the language part and of the vision tower reach vLLM before each step."""
    table = table_of(
        tmp_path,
        student__model=str(make_model(tmp_path / "student", "qwen3_vl", hidden=128, heads=(2, 1))),
        student__freeze_vision=False,
        rollout__engine="vllm",
        rollout__vllm_python=python,
        loss__correction={"measure": True},
        trainer__learning_rate=1e-2,
        cluster__start_timeout_seconds=400.0,
    )
    run = train(tmp_path, table)
    moved = changed_weights(run, table)
    assert any("language_model" in name for name in moved) and any("visual" in name for name in moved)
    lines = list(read_metrics(run / "metrics.jsonl"))
    assert [line["rollout/weight_version/min"] for line in lines] == [0, 1, 2]
    assert all(line["rollout_corr/abs_diff_max"] < 1e-3 for line in lines), lines


def test_a_managed_vllm_vision_teacher_gives_nearly_the_losses_of_a_native_one(
    tmp_path: Path, python: str
) -> None:
    """Losses differ a little because vLLM's softmax includes the image placeholders."""
    teacher = make_model(tmp_path / "teacher", "qwen3_vl", 3, hidden=128, heads=(2, 1))
    ours = {"model": str(teacher), "key": "see"}
    theirs = {**ours, "backend": "vllm", "vllm_python": python, "device": "cpu"}
    losses = []
    for name, see in (("theirs", theirs), ("ours", ours)):
        table = table_of(
            tmp_path, text_rows=0, teachers__see=see, run__dir=str(tmp_path / name), trainer__steps=2
        )
        run = train(tmp_path, table)
        losses.append([line["actor/loss"] for line in read_metrics(run / "metrics.jsonl")])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
