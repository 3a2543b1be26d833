"""A run whose vision teacher is a vLLM server of its own, in the environment that UNDERSTUDY_VLLM_PYTHON names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_image_runs import table_of, train
from vision_models import make_model

from understudy.observability.metrics import read_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_run_under_a_managed_vllm_teacher_is_that_under_a_native_one(tmp_path: Path) -> None:
    """vLLM's softmax has the placeholders too, so losses differ a little."""
    python = os.environ.get("UNDERSTUDY_VLLM_PYTHON")
    if not python:
        pytest.skip("UNDERSTUDY_VLLM_PYTHON names no Python with vllm")
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no torchvision, without which vLLM reads no pictures")
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
