"""Engines in processes of their own: the same bits as in the trainer's process, also after a kill; adapters;
fast mode."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file
from small_runs import start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit
from understudy.observability.metrics import read_metrics, without_clock
from understudy.run.launch import resume

Make = Callable[..., dict[str, Any]]
SMALL = {"trainer__steps": 3, "trainer__checkpoint_every": 3, "rollout__n": 2}


def state_of(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / "step-000003" / "model.safetensors")
    return (
        [without_clock(line) for line in read_metrics(run / "metrics.jsonl")],
        {name: tensor.tobytes() for name, tensor in weights.items()},
    )


def engines_of(launcher: int) -> list[int]:
    return [
        child.pid
        for child in psutil.Process(launcher).children()
        if "understudy.engines.hosted.process" in child.cmdline()
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_process_that_is_killed_during_the_run_gives_the_same_bits(
    recipe: Make, tmp_path: Path
) -> None:
    inside = understudy.train(recipe("inside", **SMALL), progress=False)
    table = recipe("outside", **SMALL, rollout__processes=1)
    run = Path(table["run"]["dir"])
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    while len(read_metrics(run / "metrics.jsonl")) < 1:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    (engine,) = engines_of(process.pid)
    command_line = psutil.Process(engine).cmdline()
    weights = Path(command_line[command_line.index("--weights") + 1])
    assert weights.exists()
    os.kill(engine, signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert state_of(run) == state_of(inside.dir)
    assert audit(run).balanced and audit(run).trained == 96
    log = (run / "logs" / "trainer.log").read_text()
    assert "engine process lost" in log and "is back, with weights of version" in log
    assert not weights.exists(), "snapshots are removed with the run"


@pytest.mark.slow
def test_publishing_adapters_alone_gives_the_same_losses_for_a_tenth_of_the_bytes(recipe: Make) -> None:
    """`student.lora.publish = "adapter"` compared with publishing merged weights. A resume publishes adapters too."""
    pytest.importorskip("peft")
    small = {"trainer__steps": 2, "trainer__checkpoint_every": 2, "rollout__processes": 1}
    adapters = {"rank": 1, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    merged = understudy.train(recipe("merged", **small, student__lora=adapters), progress=False)
    table = recipe("alone", **small, student__lora={**adapters, "publish": "adapter"})
    alone = understudy.train(table, progress=False)
    for ours, theirs in zip(alone.metrics, merged.metrics, strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], abs=1e-6)
        sent, whole = (line["perf/weights/published_bytes"] for line in (ours, theirs))
        assert 0 < sent < whole / 10, f"{sent:.0f} bytes instead of {whole:.0f}"
    assert alone.metrics[1]["rollout/weight_version/min"] == 1
    longer = asyncio.run(resume(alone.dir, ["trainer.steps=3"], progress=False))
    assert longer.metrics[2]["rollout/weight_version/min"] == 2


@pytest.mark.slow
def test_two_engine_processes_in_fast_mode_train_every_row_once(recipe: Make) -> None:
    run = understudy.train(
        recipe(rollout__processes=2, run__determinism="fast", trainer__steps=2), progress=False
    )
    report = audit(run.dir)
    assert report.balanced and report.trained == 32
    assert {path.name for path in (run.dir / "logs").glob("rollout-*.log")} == {
        "rollout-0.log",
        "rollout-1.log",
    }
