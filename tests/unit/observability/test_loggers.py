"""Loggers receive what metrics.jsonl holds, and a failing logger does not disturb the run."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from understudy.config import parse_recipe
from understudy.errors import ConfigError
from understudy.observability.loggers import logged_metrics
from understudy.observability.loggers.logged_metrics import LoggedMetrics, missing_loggers
from understudy.observability.metrics import read_metrics

LINE = {
    "actor/loss": 0.5,
    "val/pass@4": 0.25,
    "val/accuracy/add": 1.0,
    "broken": float("nan"),
    "name": "text",
}
NUMBERS = {"actor/loss", "val/pass@4", "val/accuracy/add"}


def write(folder: Path, name: str, first: int, warnings: list[str]) -> None:
    metrics = LoggedMetrics(
        folder / "metrics.jsonl", [name], run_name="trial", facts={"trainer.steps": 4}, warn=warnings.append
    )
    for step in range(first, first + 3):
        metrics.write(step, {**LINE, "actor/loss": 1.0 / (step + 1)})
    metrics.close()


class Recorder:
    def __init__(self, fails_at: int | None = None) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.fails_at, self.closed = fails_at, False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise OSError("no route to host")
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(logged_metrics, "LOGGERS", {"wandb": lambda *arguments: found})
    return found


def test_numbers_go_to_the_logger_and_everything_to_the_file(tmp_path: Path, recorder: Recorder) -> None:
    write(tmp_path, "wandb", 0, warnings := [])
    assert [step for step, _ in recorder.seen] == [0, 1, 2] and recorder.closed and not warnings
    assert all(values.keys() == NUMBERS for _, values in recorder.seen)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2] and lines[0]["name"] == "text"


def test_a_completed_metrics_line_is_sent_to_the_logger_as_a_whole(
    tmp_path: Path, recorder: Recorder
) -> None:
    metrics = LoggedMetrics(tmp_path / "metrics.jsonl", ["wandb"])
    metrics.write(3, {"actor/loss": 0.5})
    metrics.complete(3, {"val/accuracy": 1.0})
    metrics.close()
    assert recorder.seen == [
        (3, {"actor/loss": 0.5}),
        (3, {"actor/loss": 0.5, "val/accuracy": 1.0}),
    ]


def test_a_failing_logger_causes_one_warning_and_metrics_are_still_written_to_the_file(
    tmp_path: Path, recorder: Recorder
) -> None:
    recorder.fails_at = 1
    write(tmp_path, "wandb", 0, warnings := [])
    assert len(warnings) == 1 and "wandb" in warnings[0] and "no route to host" in warnings[0]
    assert [step for step, _ in recorder.seen] == [0] and not recorder.closed
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_a_logger_that_fails_to_start_causes_one_warning_and_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("please log in")

    monkeypatch.setattr(logged_metrics, "LOGGERS", {"wandb": refuse})
    write(tmp_path, "wandb", 0, warnings := [])
    assert len(warnings) == 1 and "please log in" in warnings[0]


def test_a_logger_whose_package_is_missing_is_reported_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = missing_loggers(["tensorboard"])
    assert 'pip install "understudy[tensorboard]"' in problem


def test_a_recipe_with_an_unknown_logger_is_refused() -> None:
    table = {"student": {"model": "s"}, "teachers": {"t": {"model": "t"}}, "data": {"train": "d"}}
    with pytest.raises(ConfigError, match="tensorboard"):
        parse_recipe({**table, "run": {"loggers": ["tensorbord"]}})


def test_tensorboard_holds_every_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (0, 0, 1):
        write(tmp_path, "tensorboard", first, warnings := [])
        assert not warnings
    events = EventAccumulator(str(tmp_path / "loggers" / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("actor/loss")}
    assert len(found) == len(events.Scalars("actor/loss"))
    assert found == pytest.approx({0: 1.0, 1: 0.5, 2: 1 / 3, 3: 0.25})
    assert set(events.Tags()["scalars"]) == NUMBERS


def test_mlflow_continues_the_same_run_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for first in (0, 2):
        write(tmp_path, "mlflow", first, warnings := [])
        assert not warnings
    folder = tmp_path / "loggers" / "mlflow"
    client = mlflow.MlflowClient(folder.resolve().as_uri())
    run_id = (folder / "run_id").read_text()
    history = client.get_metric_history(run_id, "actor/loss")
    assert {metric.step for metric in history} == {0, 1, 2, 3, 4}
    assert "val/pass_at_4" in client.get_run(run_id).data.metrics
    assert client.get_run(run_id).data.params["trainer.steps"] == "4"


def test_wandb_writes_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path, "wandb", 0, warnings := [])
    assert not warnings
    assert list((tmp_path / "loggers" / "wandb").rglob("run-*.wandb"))


def test_trackio_keeps_its_database_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("trackio") is None:  # not imported here: it reads TRACKIO_DIR on import
        pytest.skip("trackio is not installed")
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    write(tmp_path, "trackio", 0, warnings := [])
    assert not warnings
    (database,) = (tmp_path / "loggers" / "trackio").glob("*.db")
    assert database.stat().st_size > 0
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 0
