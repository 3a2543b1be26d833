"""Sends metrics, rows and spans to other programs beside metrics.jsonl: `run.loggers = ["tensorboard"]`.

    write(step, line) ──> metrics.jsonl            always, and first; everything else in this project reads it
                     └──> queue ──> one thread ──> tensorboard, wandb, trackio, mlflow, opentelemetry: as the run asks

Loggers run on a thread of their own. One that fails is warned about once and not called again, so an error
of a logger never reaches the training. Each package is an extra and imported only if the recipe names it.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from understudy.observability.loggers.kinds import (
    Logger,
    mlflow_logger,
    opentelemetry_logger,
    tensorboard_logger,
    trackio_logger,
    wandb_logger,
)
from understudy.observability.metrics import MetricsWriter

logger = logging.getLogger(__name__)

LOGGERS: Mapping[str, Callable[[Path, str, Mapping[str, Any], int], Logger]] = {
    "tensorboard": tensorboard_logger,
    "wandb": wandb_logger,
    "trackio": trackio_logger,
    "mlflow": mlflow_logger,
    "opentelemetry": opentelemetry_logger,
}
"""By name: a function of (folder, run name, recipe as dotted keys, first step)."""
_MODULES = {"opentelemetry": "opentelemetry.exporter.otlp.proto.http"}
"""The module to look for, where it has another name than the logger."""
_CLOSE_SECONDS = 30.0


def missing_loggers(names: Sequence[str]) -> list[str]:
    """One line per logger whose package is not installed."""
    return [
        f'run.loggers: {name!r} needs a package that is not installed; pip install "understudy[{name}]"'
        for name in names
        if not _installed(_MODULES.get(name, name))
    ]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


class LoggedMetrics(MetricsWriter):
    """metrics.jsonl and the loggers behind it."""

    def __init__(
        self,
        path: Path,
        names: Sequence[str] = (),
        folder: Path | None = None,
        run_name: str = "run",
        facts: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        super().__init__(path)
        self._names = tuple(names)
        self._folder = folder or path.parent / "loggers"
        self._run_name, self._facts, self._warn = run_name, dict(facts or {}), warn
        self._lines: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._teller: threading.Thread | None = None
        if self._names:
            # A daemon: a logger that hangs on a dead network must not keep a finished run from ending.
            self._teller = threading.Thread(target=self._tell, name="loggers", daemon=True)
            self._teller.start()

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return self._logged(super().write(step, values))

    def complete(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        # The whole line: a logger that is made now may discard what it has of this step.
        return self._logged(super().complete(step, values))

    def _logged(self, line: dict[str, Any]) -> dict[str, Any]:
        if self._teller is not None:
            self._lines.put(line)
        return line

    def close(self) -> None:
        super().close()
        if self._teller is not None:
            self._lines.put(None)
            self._teller.join(_CLOSE_SECONDS)
            if self._teller.is_alive():
                self._warn(
                    f"loggers {', '.join(self._names)} did not finish within {_CLOSE_SECONDS:.0f} s; left behind"
                )
            self._teller = None

    def _tell(self) -> None:
        """The thread's loop. Loggers are made at the first line, so that each knows at which step a resumed
        run continues."""
        living: dict[str, Logger] = {}
        waiting = list(self._names)
        while (line := self._lines.get()) is not None:
            step = int(line["step"])
            while waiting:
                name = waiting.pop(0)
                with self._guarded(living, name):
                    living[name] = self._make(name, step)
            numbers = {key: float(value) for key, value in line.items() if _is_number(key, value)}
            for name in list(living):
                with self._guarded(living, name):
                    living[name].write(step, numbers)
        for name in list(living):
            with self._guarded(living, name):
                living[name].close()

    def _make(self, name: str, first_step: int) -> Logger:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return LOGGERS[name](folder, self._run_name, self._facts, first_step)

    @contextmanager
    def _guarded(self, living: dict[str, Logger], name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            living.pop(name, None)
            logger.exception("logger %s failed", name)
            self._warn(f"logger {name} failed and is left out from now on: {type(error).__name__}: {error}")


def _is_number(key: str, value: Any) -> bool:
    return key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
