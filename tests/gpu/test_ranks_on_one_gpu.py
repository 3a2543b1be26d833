"""Ranks that share a GPU: a lost one is restarted, and the trainer continues from the last checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from device_world import TOKEN_VARIABLE, Teachers, World
from small_runs import run_cli, write_toml

from understudy.dataplane.ledger import audit
from understudy.observability.metrics import read_metrics

STEPS = 4
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "cuda:0",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_rank_that_shares_a_gpu_is_restarted_and_the_run_finishes(
    world: World, teachers: Teachers, tmp_path: Path, device: str
) -> None:
    """Over NCCL, torch's watchdog used to end the trainer with SIGABRT before it could start the rank again."""
    kind = device.partition(":")[0]
    teacher = {
        "model": str(world.model("teacher")),
        "placement": "external",
        "urls": [teachers.url(kind)],
        "token_env": TOKEN_VARIABLE,
    }
    recipe: dict[str, Any] = {
        "student": {
            "model": str(world.model("qwen3")),
            "device": device,
            "dtype": "bfloat16" if kind == "cuda" else "float32",
        },
        "teachers": {"teacher": teacher},
        "data": {"train": str(world.prompts)},
        "loss": {"topk": 16},
        "rollout": {"max_new_tokens": 12, "max_batch": 16},
        "trainer": {"steps": STEPS, "batch_size": 8, "ranks": 2, "checkpoint_every": 1},
        "run": {"dir": str(tmp_path / "run"), "threads": 1},
    }
    path = write_toml(tmp_path / "recipe.toml", recipe)
    code, output = run_cli("train", str(path), "--quiet", fault="rank.after_command:9")
    assert code == 0, output
    log_text = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert "rank 1 of 2 was killed by SIGKILL" in log_text and "going back to step" in log_text
    steps = [
        line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "actor/loss" in line
    ]
    assert steps == list(range(1, STEPS + 1))
    report = audit(tmp_path / "run")
    assert report.balanced and report.trained == STEPS * 8
