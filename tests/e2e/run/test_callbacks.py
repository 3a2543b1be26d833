"""Callbacks of runs from Python: when they are called, with what, and what their errors do."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_runs import half_reward, interrupt_after, rows, run_in_notebook_cell
from small_runs import ASSETS

import understudy
from understudy.dataplane.ledger import audit
from understudy.errors import CallbackError, ConfigError
from understudy.observability.metrics import read_metrics, without_clock
from understudy.observability.rundir import read_json
from understudy.policy.checkpoints.checkpoint import verify

Distill = Callable[..., understudy.Run]
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "fully_async": {"trainer__mode": "fully_async", "trainer__max_staleness": 1.0},
}
EVAL: dict[str, Any] = {"eval_data": rows("sort", 4), "reward": half_reward, "trainer__eval_every": 1}


class Recorder:
    """Everything a run reported, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.steps: list[understudy.Step] = []
        self.evaluations: list[understudy.Evaluation] = []
        self.checkpoints: list[understudy.SavedCheckpoint] = []

    def on_step(self, step: understudy.Step) -> None:
        self.calls.append(("step", step.step))
        self.steps.append(step)

    def on_eval(self, evaluation: understudy.Evaluation) -> None:
        self.calls.append(("eval", evaluation.step))
        self.evaluations.append(evaluation)

    def on_checkpoint(self, checkpoint: understudy.SavedCheckpoint) -> None:
        verify(
            checkpoint.path
        )  # complete on disk when the callback runs, before the next checkpoint prunes it
        self.calls.append(("checkpoint", checkpoint.step))
        self.checkpoints.append(checkpoint)

    @property
    def all(self) -> dict[str, Callable[..., None]]:
        return {"on_step": self.on_step, "on_eval": self.on_eval, "on_checkpoint": self.on_checkpoint}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("async_save", [False, True])
def test_every_step_evaluation_and_checkpoint_is_reported_to_callbacks_also_after_a_resume(
    distill: Distill, mode: str, async_save: bool
) -> None:
    recorder = Recorder()
    run = distill(
        **EVAL, **MODES[mode], **recorder.all, trainer__async_save=async_save, trainer__keep_best=True
    )
    assert (
        [step.metrics for step in recorder.steps]
        == run.metrics[1:]
        == read_metrics(run.dir / "metrics.jsonl")[1:]
    )
    assert {(step.steps, step.dir) for step in recorder.steps} == {(2, run.dir)}
    assert recorder.evaluations == run.evaluations and [one.step for one in recorder.evaluations] == [0, 1, 2]
    assert {one.accuracy for one in recorder.evaluations} == {0.5}
    assert [(one.step, one.path.name, one.best) for one in recorder.checkpoints] == [
        (1, "step-000001", True),
        (2, "step-000002", False),
    ]
    if not async_save:
        assert recorder.calls == [
            ("eval", 0), ("eval", 1), ("step", 1), ("checkpoint", 1), ("eval", 2), ("step", 2), ("checkpoint", 2)
        ]  # fmt: skip
    more = Recorder()
    run.resume(progress=False, trainer__steps=3, **more.all)
    assert sorted(more.calls) == [("checkpoint", 3), ("eval", 3), ("step", 3)]
    assert len(recorder.steps) == 2


class OwnError(Exception):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["on_step", "on_eval", "on_checkpoint"])
def test_an_error_in_a_callback_is_raised_to_the_caller_and_the_step_is_saved(
    distill: Distill, tmp_path: Path, mode: str, where: str
) -> None:
    def fails(report: Any) -> None:
        if report.step == 1:
            raise OwnError("no such table")

    changes = {**EVAL, **MODES[mode], "trainer__steps": 3}
    if where != "on_checkpoint":
        changes["trainer__checkpoint_every"] = 50  # only the error causes a save
    with pytest.raises(CallbackError) as raised:
        distill(**changes, **{where: fails})
    assert isinstance(raised.value.__cause__, OwnError)
    message = str(raised.value)
    assert f"{where} (test_callbacks.test_an_error" in message and "raised OwnError: no such table" in message
    assert "after step 1" in message and f"understudy.resume('{tmp_path / 'run'}')" in message
    state = read_json(tmp_path / "run" / "state.json")
    assert state["status"] == "failed" and "no such table" in state["detail"]
    verify(tmp_path / "run" / "checkpoints" / "step-000001")
    whole = distill("whole", **changes)
    resumed = understudy.resume(tmp_path / "run", progress=False)
    assert audit(resumed.dir).per_step == {1: 8, 2: 8, 3: 8}
    if mode == "sync":
        assert [without_clock(line) for line in resumed.metrics] == [
            without_clock(line) for line in whole.metrics
        ]


@pytest.mark.parametrize("leaves", [SystemExit, KeyboardInterrupt])
def test_system_exit_or_keyboard_interrupt_in_a_callback_ends_only_the_run(
    distill: Distill, tmp_path: Path, leaves: type[BaseException]
) -> None:
    def on_step(step: understudy.Step) -> None:
        raise leaves

    with pytest.raises(CallbackError, match=leaves.__name__):
        distill(on_step=on_step)
    verify(tmp_path / "run" / "checkpoints" / "step-000001")


def test_a_callback_error_before_the_first_step_saves_no_checkpoint(distill: Distill, tmp_path: Path) -> None:
    def on_eval(evaluation: understudy.Evaluation) -> None:
        raise OwnError

    with pytest.raises(CallbackError, match="raised OwnError:  after step 0"):
        distill(**EVAL, on_eval=on_eval)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_ctrl_c_does_not_wait_for_a_callback_that_hangs(distill: Distill, tmp_path: Path) -> None:
    before, hangs = signal.getsignal(signal.SIGINT), threading.Event()

    def on_step(step: understudy.Step) -> None:
        hangs.wait()

    interrupt_after(tmp_path / "run", steps=1)
    run = run_in_notebook_cell(lambda: distill(on_step=on_step, trainer__checkpoint_every=50))
    hangs.set()  # Python waits for its thread at exit
    assert run.status == "stopped" and run.steps == 1
    verify(run.dir / "checkpoints" / "step-000001")
    assert signal.getsignal(signal.SIGINT) is before


def test_callbacks_of_the_wrong_type_are_refused() -> None:
    async def later(step: understudy.Step) -> None: ...

    given: dict[str, Any] = {"student": ASSETS, "teacher": ASSETS, "data": []}
    with pytest.raises(ConfigError, match="on_step is a int; expected a function"):
        understudy.distill(**given, on_step=3)
    with pytest.raises(ConfigError, match="on_eval is an async function; expected a plain one"):
        understudy.distill(**given, on_eval=later)
