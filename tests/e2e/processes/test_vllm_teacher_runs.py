"""Runs that start a vLLM server as their teacher: its deaths and a resume change no metric, and it ends with
the run."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from bigram_server import LAST_WORDS, lives, stand_in
from small_runs import ASSETS, living_children
from vllm_student import write_student

import understudy
from understudy.errors import CallbackError, UnderstudyError
from understudy.observability.metrics import without_clock
from understudy.planning.preflight import PYTHON_VARIABLE

Make = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.timeout(150)


def teachers(model: str = str(ASSETS / "models" / "teacher-add"), **more: Any) -> dict[str, Any]:
    return {
        "big": {"model": model, "backend": "vllm", "vllm_python": sys.executable, "device": "cpu", **more}
    }


def steps_of(run: understudy.Run) -> list[dict[str, Any]]:
    return [without_clock(line) for line in run.metrics]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Only 64 rows, because the check before a run reads all of them."""
    found = (ASSETS / "data" / "train.jsonl").read_text().splitlines(keepends=True)[:64]
    (tmp_path / "rows.jsonl").write_text("".join(found))
    return str(tmp_path / "rows.jsonl")


@pytest.fixture
def stand_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    def plan(what: str) -> Path:
        folder = tmp_path / f"plan {what}"
        folder.mkdir()
        for key, value in stand_in(folder, what).items():
            monkeypatch.setenv(key, value)
        return folder

    return plan


def test_vllm_teacher_deaths_and_a_resume_do_not_change_the_metrics(
    recipe: Make, rows: str, stand_in_vllm: Callable[[str], Path]
) -> None:
    small = {"data__train": rows, "trainer__steps": 2, "trainer__checkpoint_every": 1}
    stand_in_vllm("serves")
    whole = understudy.train(recipe("whole", teachers=teachers(), **small), progress=False)
    assert whole.metrics[0]["actor/loss"] != whole.metrics[1]["actor/loss"]
    folder = stand_in_vllm("12,8,serves")  # the server dies in its 13th answer, its successor soon after
    table = recipe("hurt", teachers=teachers(), **small)

    def end(step: understudy.Step) -> None:
        if step.step == 1:
            raise RuntimeError("enough")

    with pytest.raises(CallbackError, match="enough"):
        understudy.train(table, progress=False, on_step=end)
    resumed = understudy.resume(table["run"]["dir"], progress=False)
    assert steps_of(resumed) == steps_of(whole)
    assert len(lives(folder)) == 4, "the first start, one after each of two deaths, and the resumed run's"
    log = (resumed.dir / "logs" / "trainer.log").read_text()
    assert "back after a restart" in log and "batches by arrival" not in log


def test_a_run_whose_vllm_teacher_keeps_dying_ends_with_the_server_s_last_output(
    recipe: Make, rows: str, stand_in_vllm: Callable[[str], Path]
) -> None:
    stand_in_vllm("12,dies at once")
    table = recipe(data__train=rows, teachers=teachers(), cluster__restarts={"teacher": 1})
    with pytest.raises(UnderstudyError, match=LAST_WORDS) as caught:
        understudy.train(table, progress=False)
    assert "cluster.restarts.teacher" in str(caught.value)
    assert not [one for one in living_children() if "--scores" in one.cmdline()]


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not os.environ.get(PYTHON_VARIABLE), reason=f"set {PYTHON_VARIABLE} to an interpreter that has vLLM"
)
def test_killing_a_real_vllm_teacher_during_a_run_does_not_change_the_metrics(
    recipe: Make, tmp_path: Path
) -> None:
    """The losses are also near those under a native replica."""
    model = write_student(tmp_path / "teacher", seed=5)
    more = {"trainer__steps": 3, "loss__topk": 6, "cluster__start_timeout_seconds": 400.0}
    ours = understudy.train(recipe("ours", teachers={"big": {"model": model}}, **more), progress=False)
    own = {"big": {"model": model, "backend": "vllm"}}
    whole = understudy.train(recipe("whole", teachers=own, **more), progress=False)
    for one, other in zip(whole.metrics, ours.metrics, strict=True):
        assert one["actor/loss"] == pytest.approx(other["actor/loss"], abs=1e-4)

    def kill(step: understudy.Step) -> None:
        if step.step == 1:
            (server,) = [
                one for one in living_children() if "vllm.entrypoints.openai.api_server" in one.cmdline()
            ]
            os.kill(server.pid, signal.SIGKILL)

    killed = understudy.train(recipe("killed", teachers=own, **more), progress=False, on_step=kill)
    assert steps_of(killed) == steps_of(whole)
    assert "back after a restart" in (killed.dir / "logs" / "trainer.log").read_text()
    assert not [one for one in psutil.process_iter(["cmdline"]) if model in (one.info["cmdline"] or [])]
