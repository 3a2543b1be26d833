"""Carries out a schedule against a real run: starts it, injects the faults, resumes it until it ends, and reads its history.

What is not tried here: a full or lying disk, clock jumps, partitions between processes, Ray nodes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from checker import AT_START, Event, History, Launch, Promise
from modes import MODES, ROLES, STEPS, recipe
from schedules import Fault, Schedule
from small_runs import write_toml

from understudy.observability.metrics import read_metrics, without_clock

LONGEST = 240.0
"""Seconds that a run may take after the last fault. An undisturbed one takes about ten."""
_MARK = "UNDERSTUDY_NEMESIS"
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
_HALF_A_LINE = b'{"step": 99, "actor/lo'
_CACHES = ("torchinductor_",)
"""Kept by libraries between processes on purpose."""
_TESTS = Path(__file__).parents[1]


@dataclass
class Trial:
    """One run of a mode under a schedule, in a folder of its own."""

    schedule: Schedule
    folder: Path
    pending: list[Fault] = field(init=False)
    launches: list[Launch] = field(default_factory=list)
    injected: list[Fault] = field(default_factory=list)
    _frozen: list[tuple[float, psutil.Process]] = field(default_factory=list)
    _last_fault: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.pending = list(self.schedule.faults)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def carry_out(self) -> History:
        """Launches until one ends by itself with 0, at most once more than there are faults."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "tmp").mkdir(parents=True)
        table = write_toml(self.folder / "recipe.toml", recipe(MODES[self.schedule.mode], self.folder))
        finished = False
        for _ in range(len(self.schedule.faults) + 1):
            begun = (self.run / "recipe.json").exists()
            words = ["resume", str(self.run)] if begun else ["train", str(table)]
            launch = self._launch(words)
            self.launches.append(launch)
            finished = launch.code == 0 and self._steps() == STEPS
            if finished or (launch.code != 0 and not launch.faults):
                break
        return self.history(finished)

    def _launch(self, words: list[str]) -> Launch:
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", _MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join([str(_TESTS / "e2e"), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        hit: list[str] = []
        if point := next(
            (one for one in self.pending if one.kind == "point" and one.after <= self._steps()), None
        ):
            self.pending.remove(point)
            env["UNDERSTUDY_FAULT"] = point.place
            self.injected.append(point)
            hit.append("point")
        log = self.folder / f"launch{len(self.launches)}.log"
        with log.open("wb") as sink:
            trainer = psutil.Popen(
                [sys.executable, "-m", "understudy.cli.main", *words, "--quiet"],
                env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        before = self._steps()
        started = ready = self._last_fault = time.monotonic()
        while trainer.poll() is None:
            self._thaw()
            now = time.monotonic()
            fault = next((one for one in self.pending if one.kind != "point"), None)
            if fault is None or self._steps() < fault.after:
                ready = now
            elif now - max(ready, started) >= fault.delay and (target := _target(fault, trainer)) is not None:
                self.pending.remove(fault)
                self.injected.append(fault)
                hit.append(self._inject(fault, trainer, target))
                if fault.role != "trainer" and self._steps() == before:
                    hit[-1] = AT_START
                ready = self._last_fault = time.monotonic()
            if now - self._last_fault > LONGEST:
                trainer.kill()
                hit.append("given up")
            time.sleep(0.02)
        self._thaw(everything=True)
        return Launch(int(trainer.returncode), tuple(hit), log.read_text(errors="replace"))

    def _inject(self, fault: Fault, trainer: psutil.Popen, target: psutil.Process) -> str:
        """Returns whom it hit, and how."""
        with suppress(psutil.NoSuchProcess):
            if fault.kind == "tear":
                trainer.kill()
                trainer.wait()
                for path in (self.run / "metrics.jsonl", self.run / "spans.jsonl"):
                    if path.exists():
                        path.write_bytes(path.read_bytes() + _HALF_A_LINE)
            elif fault.kind == "freeze":
                target.suspend()
                self._frozen.append((time.monotonic() + fault.seconds, target))
            else:
                target.send_signal(_SIGNALS[fault.kind])
        return fault.kind if fault.role == "trainer" else f"{fault.kind} {fault.role}"

    def _thaw(self, everything: bool = False) -> None:
        now = time.monotonic()
        for until, process in list(self._frozen):
            if everything or now >= until:
                self._frozen.remove((until, process))
                with suppress(psutil.NoSuchProcess):
                    process.resume()
                self._last_fault = now

    def _steps(self) -> int:
        return sum("actor/loss" in line for line in _metrics(self.run))

    def history(self, finished: bool = True) -> History:
        left = _left_behind(self.folder)
        events, in_flight = read_journal(self.run / "dataplane")
        checkpoint = self.run / "checkpoints" / f"step-{STEPS:06d}"
        files = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(checkpoint.glob("*.safetensors"))
        }
        return History(
            self.launches, events, in_flight, _metrics(self.run), read_letters(self.run / "dataplane"), _kept(self.run), files, left, finished
        )  # fmt: skip


def reference(mode: str, folder: Path) -> History:
    """The history of the undisturbed run, made once in this folder."""
    trial = Trial(Schedule(mode, ()), folder)
    if (trial.run / "report.html").exists():
        return trial.history()
    found = trial.carry_out()
    if not found.finished:
        raise RuntimeError(f"the undisturbed run of '{mode}' failed: {found.launches[-1].output[-2000:]}")
    return found


def promise(mode: str) -> Promise:
    own = MODES[mode]
    bound = None if own.staleness is None else math.ceil(own.staleness)  # the proof in docs/async.md
    return Promise(STEPS, own.to_the_bit, own.same_rows, bound)


def _target(fault: Fault, trainer: psutil.Popen) -> psutil.Process | None:
    processes = [trainer] if fault.role == "trainer" else list(_of_role(trainer, fault.role))
    return processes[fault.which % len(processes)] if processes else None


def _of_role(trainer: psutil.Popen, role: str) -> Iterator[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        for child in sorted(trainer.children(recursive=True), key=lambda one: one.pid):
            with suppress(psutil.NoSuchProcess):
                if ROLES[role] in child.cmdline():
                    yield child


def _metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [without_clock(line) for line in read_metrics(path)] if path.exists() else []


def read_journal(folder: Path) -> tuple[list[Event], frozenset[str]]:
    """The events of a data plane's folder, and the rows in flight."""
    file = folder / "journal.sqlite"
    if not file.exists():
        return [], frozenset()
    with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as journal:
        events = journal.execute("SELECT kind, key, sign, step FROM facts ORDER BY seq, place")
        rows = journal.execute("SELECT key FROM rows WHERE trained IS NULL")
        return [Event(*event) for event in events], frozenset(key for (key,) in rows)


def read_letters(folder: Path) -> dict[str, str]:
    file = folder / "dead_letters.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {letter["key"]: letter["reason"] for letter in map(json.loads, lines)}


def _kept(run: Path) -> list[dict[str, Any]]:
    return [
        {"step": int(path.stem), **json.loads(line)}
        for path in sorted((run / "kept_rows").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def _left_behind(folder: Path) -> list[str]:
    """Processes and temporary files of the run. Processes have ten seconds to see that their trainer is gone."""
    deadline = time.monotonic() + 10
    while (alive := _processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = [" ".join(process.cmdline())[:120] for process in alive if process.is_running()]
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    files = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(_CACHES)]
    return names + [f"tmp/{name}" for name in files]


def _processes(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
