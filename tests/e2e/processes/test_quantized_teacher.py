"""Runs under a teacher with eight-bit weights: losses near those of full weights, and equal metrics after a resume."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import ASSETS, call_cli, run_cli, write_toml

import understudy
from understudy.observability.metrics import read_metrics, without_clock

Make = Callable[..., dict[str, Any]]


def teachers(**more: Any) -> dict[str, Any]:
    return {"add": {"model": str(ASSETS / "models" / "teacher-add"), **more}}


@pytest.mark.timeout(150)
def test_an_int8_teacher_gives_nearly_the_same_loss_and_logs_its_error(recipe: Make, tmp_path: Path) -> None:
    full = understudy.train(recipe("full", teachers=teachers(), trainer__steps=1), progress=False)
    table = recipe("int8", teachers=teachers(quantize="int8"), trainer__steps=1)
    int8 = understudy.train(table, progress=False)
    one, other = full.metrics[0]["actor/loss"], int8.metrics[0]["actor/loss"]
    assert one != other and one == pytest.approx(other, rel=0.02)
    log = (int8.dir / "logs" / "trainer.log").read_text()
    assert "teacher add has weights in float32+int8: KL " in log
    code, output = call_cli("resume", str(int8.dir), 'teachers.add.quantize="fp8"')
    assert code == 2 and "cannot resume with teachers.add.quantize = 'fp8', the run has 'int8'" in output


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_killed_and_resumed_run_with_an_int8_teacher_has_the_same_metrics(
    recipe: Make, tmp_path: Path, mode: str
) -> None:
    more = {"teachers": teachers(quantize="int8"), "trainer__mode": mode, "run__determinism": "full"}
    if mode == "fully_async":
        more |= {"trainer__max_staleness": 0}
    whole = understudy.train(recipe("whole", **more), progress=False)
    table = recipe("killed", **more)
    fault = "sync.after_update:3" if mode == "sync" else "async.after_update:3"
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault=fault)
    assert code == -signal.SIGKILL, output
    code, output = call_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    resumed = read_metrics(Path(table["run"]["dir"]) / "metrics.jsonl")
    assert [without_clock(line) for line in resumed] == [without_clock(line) for line in whole.metrics]
