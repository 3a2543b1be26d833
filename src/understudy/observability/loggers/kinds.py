"""The external metric loggers (tensorboard, wandb, trackio, mlflow), each behind the same two calls.

`folder` is RUN/loggers/NAME.

Everything they write is in RUN/loggers/NAME unless their own environment variables say otherwise. A resumed
run continues in the same place: ids are kept in a file there.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from understudy.observability.loggers.traces import OtlpSpans, TracedRows, kept_id

PROJECT = "understudy"


class Logger(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def tensorboard_logger(folder: Path, run_name: str, facts: Mapping[str, Any], first_step: int) -> Logger:
    """Steps after a return to a checkpoint replace what was written for them before."""
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        str(folder), purge_step=first_step
    )
    writer.add_text("recipe", "\n".join(f"    {key} = {value!r}" for key, value in facts.items()), first_step)
    return _TensorBoard(writer)


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def wandb_logger(folder: Path, run_name: str, facts: Mapping[str, Any], first_step: int) -> Logger:
    """Online with a key, offline without (`wandb sync RUN/loggers/wandb/…` later); WANDB_* variables win."""
    wandb = importlib.import_module("wandb")
    known = os.environ.get("WANDB_API_KEY") or (Path.home() / ".netrc").exists()
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run_name,
        id=kept_id(folder, lambda: secrets.token_hex(4)),
        resume="allow",
        dir=str(folder),
        config=dict(facts),
        mode=os.environ.get("WANDB_MODE") or ("online" if known else "offline"),
        settings=wandb.Settings(silent=True, console="off"),
    )
    # Our own step as the axis: wandb's only increases, and a resumed run goes back.
    run.define_metric("*", step_metric="step")
    return _Wandb(run)


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def trackio_logger(folder: Path, run_name: str, facts: Mapping[str, Any], first_step: int) -> Logger:
    """`trackio show` with TRACKIO_DIR=RUN/loggers/trackio. Kept rows (`run.keep_rows`) become traces."""
    os.environ.setdefault("TRACKIO_DIR", str(folder))
    trackio = importlib.import_module("trackio")
    config = {
        key: value if isinstance(value, int | float | str | None) else repr(value)
        for key, value in facts.items()
    }
    run = trackio.init(project=PROJECT, name=run_name, config=config, resume="allow", embed=False)
    return _Trackio(run, TracedRows(folder.parents[1], folder), trackio.Trace)


class _Trackio:
    def __init__(self, run: Any, rows: TracedRows, trace: Any) -> None:
        self._run, self._rows, self._trace = run, rows, trace
        self._step = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)
        self._step = step
        self._tell_rows(step - 1)  # those of this step may still be in the making

    def close(self) -> None:
        self._tell_rows(self._step)
        self._run.finish()

    def _tell_rows(self, last_step: int) -> None:
        for step, rows in self._rows.new(last_step):
            traces = [self._trace(messages=row.messages, metadata=row.facts) for row in rows]
            self._run.log({"rows": traces}, step=step)


def opentelemetry_logger(folder: Path, run_name: str, facts: Mapping[str, Any], first_step: int) -> Logger:
    """Spans alone, to OTEL_EXPORTER_OTLP_ENDPOINT (http://localhost:4318 if not set)."""
    return _OpenTelemetry(OtlpSpans(folder.parents[1] / "spans.jsonl", folder, run_name))


class _OpenTelemetry:
    def __init__(self, spans: OtlpSpans) -> None:
        self._spans = spans

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._spans.send_new()

    def close(self) -> None:
        self._spans.send_new()
        self._spans.close()


def mlflow_logger(folder: Path, run_name: str, facts: Mapping[str, Any], first_step: int) -> Logger:
    """To MLFLOW_TRACKING_URI, or into files of the run directory."""
    if "MLFLOW_TRACKING_URI" not in os.environ:
        # Recent versions ask for a database server and accept files only if this is set.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or folder.resolve().as_uri())
    experiment = client.get_experiment_by_name(PROJECT)
    place = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    known = folder / "run_id"
    fresh = not known.exists()
    run_id = kept_id(folder, lambda: client.create_run(place, run_name=run_name).info.run_id)
    if fresh:
        for key, value in facts.items():
            client.log_param(run_id, key.replace("@", "_"), str(value)[:500])
    return _Mlflow(client, run_id, importlib.import_module("mlflow.entities").Metric)


class _Mlflow:
    def __init__(self, client: Any, run_id: str, metric: Any) -> None:
        self._client, self._run_id, self._metric = client, run_id, metric

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # MLflow's names may not contain @: pass@4 becomes pass_at_4.
        now = int(time.time() * 1000)
        entries = [
            self._metric(name.replace("@", "_at_"), value, timestamp=now, step=step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=entries)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
