"""Carries out a schedule against a real run: starts it, injects the faults, resumes it until it ends, and reads its history.

Not covered: a disk that loses data although it confirmed a flush.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import math
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
from checker import AT_START, GIVEN_UP_ON, UNREACHED, History, Launch, Promise
from injection import Injector, flush_library
from modes import MODES, STEPS, recipe
from network import Proxy, server_url
from reading import count_steps, read_journal, read_kept, read_letters, read_spans, read_steps, scored_again
from schedules import MEMORY, PRELOADED, Fault, Schedule
from small_runs import write_toml
from starting import MARK, Trainer, start_trainer

from understudy.cluster.fork_server import ForkServer

Found = TypeVar("Found")
LONGEST = 150.0
"""Seconds that a run may take after the last fault. An undisturbed one takes about ten; a process may take 180 to start."""
LONGEST_ON_RAY = 2 * LONGEST
"""Ray, TransferQueue and workers on it start one after the other: two minutes beside other programs on two cores."""
_CACHES = ("torchinductor_", "ray")
"""Caches that libraries keep between processes on purpose."""
_LOOK_SECONDS = 0.03
_AGAIN_SECONDS = 0.3
"""How long a fault waits if its process was not there: listing all processes takes milliseconds of CPU time."""


@dataclass
class Trial:
    """One run of a mode under a schedule, in a folder of its own."""

    schedule: Schedule
    folder: Path
    server: ForkServer | None = None
    """What trainers are forked from; None: each is a fresh Python."""
    pending: list[Fault] = field(init=False)
    launches: list[Launch] = field(default_factory=list)
    injected: list[Fault] = field(default_factory=list)
    _injector: Injector = field(init=False)
    _last_fault: float = field(default_factory=time.monotonic)
    _seen: tuple[tuple[int, int] | None, int] = (None, 0)
    """Time and size of the metrics when they were read last, and the steps they had."""

    def __post_init__(self) -> None:
        able = bool(flush_library())
        self.pending = [one for one in self.schedule.faults if able or one.kind not in PRELOADED]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def carry_out(self) -> History:
        """Launches until one ends by itself with 0, at most once more than there are faults."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "tmp").mkdir(parents=True)
        mode = MODES[self.schedule.mode]
        proxy = Proxy(server_url()) if mode.external else Proxy() if mode.proxied else None
        self._injector = Injector(self.folder, proxy)
        made = recipe(mode, self.folder, proxy.url if proxy is not None and mode.external else None)
        try:
            finished = self._launches(write_toml(self.folder / "recipe.toml", made))
        finally:
            self._injector.undo(everything=True)
            if proxy is not None:
                proxy.close()
        return self.history(finished)

    def _launches(self, table: Path) -> bool:
        for _ in range(len(self.schedule.faults) + 1):
            begun = (self.run / "recipe.json").exists()
            arguments = ["resume", str(self.run)] if begun else ["train", str(table)]
            launch = self._launch(arguments)
            self.launches.append(launch)
            if launch.code == 0 and self._steps() == STEPS:
                return True
            if launch.code != 0 and not launch.faults:
                break
        return False

    def _launch(self, arguments: list[str]) -> Launch:
        point = next(
            (one for one in self.pending if one.kind == "point" and one.after <= self._steps()), None
        )
        log = self.folder / f"launch{len(self.launches)}.log"
        more = {"UNDERSTUDY_NEMESIS_FLUSH": str(self._injector.flush)}
        if point is not None:
            self.pending.remove(point)
            more["UNDERSTUDY_FAULT"] = point.place
        if (
            "fork server" not in MODES[self.schedule.mode].roles
        ):  # a mode that kills it starts it as a fresh Python
            teachers = MODES[self.schedule.mode].changes.get("teachers", True)
            more["UNDERSTUDY_NEMESIS_FORKED"] = "with teachers" if teachers else "without teachers"
        if MODES[self.schedule.mode].proxied and self._injector.proxy is not None:
            more["UNDERSTUDY_NEMESIS_PROXY"] = str(self._injector.proxy.port)
        trainer = start_trainer(arguments, self.folder, self._injector.shim, log, more, self.server)
        hit = self._disturb(trainer)
        code = int(trainer.wait())
        self._injector.undo(everything=True)
        if point is not None and code == -9 and "kill" not in hit:  # the trainer reached the kill point
            self.injected.append(point)
            hit.append("point")
        return Launch(code, tuple(hit), log.read_text(errors="replace"))

    def _disturb(self, trainer: Trainer) -> list[str]:
        """Injects faults until the trainer ends; returns which role each one hit, and how."""
        hit: list[str] = []
        before = self._steps()
        times: dict[int, float] = {}
        """When each fault that has become due is injected, or tried again."""
        self._last_fault = time.monotonic()
        while trainer.poll() is None:
            if self._injector.undo():
                self._last_fault = time.monotonic()
            now, steps = time.monotonic(), self._steps()
            before = min(before, steps)  # a resume removes the metrics of steps that it repeats
            due = [one for one in self.pending if one.kind != "point" and one.after <= steps]
            for fault in sorted(due, key=lambda one: one.ends_trainer):
                if now < times.setdefault(id(fault), now + fault.delay):
                    continue
                how = self._injector.inject(fault, trainer)
                if how is None:
                    times[id(fault)] = now + _AGAIN_SECONDS
                    continue
                self.pending = [one for one in self.pending if one is not fault]
                self.injected.append(fault)
                if steps == before and fault.hits_others and fault.kind != MEMORY:
                    how = UNREACHED if fault.role == "trainer" else AT_START
                hit.append(how)
                self._last_fault = time.monotonic()
                if fault.ends_trainer:
                    break
            if now - self._last_fault > (
                LONGEST_ON_RAY if "node" in MODES[self.schedule.mode].roles else LONGEST
            ):
                trainer.kill()
                hit.append(GIVEN_UP_ON)
            time.sleep(_LOOK_SECONDS)
        return hit

    def _steps(self) -> int:
        try:
            status = (self.run / "metrics.jsonl").stat()
        except FileNotFoundError:
            return 0
        if self._seen[0] != (status.st_mtime_ns, status.st_size):
            self._seen = (status.st_mtime_ns, status.st_size), count_steps(self.run)
        return self._seen[1]

    def history(self, finished: bool = True) -> History:
        left = left_behind(self.folder) + [f"run/{one.name}" for one in self.run.glob(".*.tmp")]
        plane, unreadable = self.run / "dataplane", list[str]()

        def read(reader: Callable[[Path], Found], place: Path, nothing: Found) -> Found:
            try:
                return reader(place)
            except (ValueError, KeyError, TypeError, sqlite3.Error) as error:
                unreadable.append(f"{reader.__name__}: {error!r}")
                return nothing

        events, in_flight = read(read_journal, plane, ([], frozenset()))
        metrics, letters = read(read_steps, self.run, []), read(read_letters, plane, {})
        kept = read(lambda run: scored_again(run, read_kept(run), self.folder / "recipe.toml"), self.run, [])
        files = digests(self.run / "checkpoints" / f"step-{STEPS:06d}")
        return History(
            self.launches, events, in_flight, metrics, letters, kept, files, left, finished, unreadable, read_spans(self.run)
        )  # fmt: skip


def digests(checkpoint: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.glob("*.safetensors"))
    }


@functools.cache
def reference(mode: str, folder: Path, server: ForkServer | None = None) -> History:
    """The history of the undisturbed run, made once in this folder. A lock lets several processes share the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        trial = Trial(Schedule(mode, ()), folder, server)
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


def left_behind(folder: Path) -> list[str]:
    """Processes and temporary files of the run. Processes have ten seconds to notice that their trainer has
    ended; Ray's agents look for their node every few seconds, five times."""
    began = time.monotonic()
    while alive := processes_of(folder):
        allowed = 40 if all(_is_ray(process) for process in alive) else 10
        if time.monotonic() - began > allowed:
            break
        time.sleep(0.2)
    names = [" ".join(process.cmdline())[:120] for process in alive if process.is_running()]
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    files = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(_CACHES)]
    return names + [f"tmp/{name}" for name in files]


def _is_ray(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("ray::" in word or "/ray/" in word for word in process.cmdline()[:4])
    return True


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes of the run, found by environment, command line or open files: a process that sets its title
    overwrites its environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            mark = str(folder)
            known = process.environ().get(MARK) == mark or any(
                word == mark or mark + os.sep in word for word in process.cmdline()
            )
            if known or any(one.path.startswith(mark + os.sep) for one in process.open_files()):
                found.append(process)
    return found
