"""Injects each kind of fault into a run, and undoes it when its time is over."""

from __future__ import annotations

import atexit
import functools
import json
import math
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from checker import DISK, NO_MEMORY
from modes import ROLES
from network import Proxy, strangers
from schedules import (
    CLOCK,
    FREEZE_WAITING,
    FSYNC,
    LOST_MACHINE,
    MEMORY,
    NETWORK,
    PRELOADED,
    SQLITE,
    STRANGERS,
    Fault,
)

_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
_HALF_A_LINE = b'{"step": 99, "actor/lo'
_FULL_AT = (64 << 10, 64 << 10, 12 << 10, 1 << 10)
"""Bytes beyond which no file of the trainer can grow while its disk is full; `Fault.which` chooses. The first leave room for
metrics, not for the journal."""
_SWING_SECONDS = 10.0
_SPARE = (4 << 20, 0)
"""Bytes that a process without memory can still get; `Fault.which` chooses."""
_WAITING_SECONDS = 3.0
"""The trainer asks its processes within that time, also on a busy machine."""


class Injector:
    """Injects and undoes the faults of one trial. The driver calls it whenever it polls the trainer."""

    def __init__(self, folder: Path, proxy: Proxy | None) -> None:
        self.run, self.proxy = folder / "run", proxy
        self.shim = folder / "shim.json"
        self.flush = folder / "flush-fails"
        """While it exists, flushes of the journal fail; with `.full` at its end, writes (`shim/flush.c`)."""
        self._lasting: list[tuple[float, Callable[[], None]]] = []

    def inject(self, fault: Fault, trainer: psutil.Popen) -> str | None:
        """Returns the kind of fault and the role that it hit; None if its process or the files to damage do not
        exist."""
        target = _target(fault, trainer)
        if target is None or (fault.kind == "corrupt" and len(self._checkpoints()) < 2):
            return None
        if fault.kind in ("tear", "corrupt"):
            return "kill" if self._kill_and_damage(fault, trainer) else None
        if fault.kind == STRANGERS:
            return self._crowd(fault, trainer)
        if fault.kind == FREEZE_WAITING:
            return self._freeze_waiting(fault, trainer)
        if fault.kind == LOST_MACHINE:
            return self._lose_machine(fault, target)
        with suppress(psutil.NoSuchProcess):
            self._do(fault, trainer, target)
        if fault.kind in ("failing fsync", *PRELOADED, "full disk"):
            return DISK  # but not for a slow fsync, which must not end a launch
        if fault.kind == MEMORY:
            return NO_MEMORY if fault.role == "trainer" else f"{fault.kind} {fault.role}"
        if fault.kind == "everything":
            return "kill"
        return fault.kind if fault.role == "trainer" else f"{fault.kind} {fault.role}"

    def _do(self, fault: Fault, trainer: psutil.Popen, target: psutil.Process) -> None:
        if fault.kind in _SIGNALS:
            target.send_signal(_SIGNALS[fault.kind])
        elif fault.kind == "freeze":
            target.suspend()
            self._later(fault.seconds, lambda: _resume(target))
        elif fault.kind == "everything":
            for one in [trainer, *trainer.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        elif fault.kind == "full disk":
            _, hard = target.rlimit(psutil.RLIMIT_FSIZE)
            target.rlimit(psutil.RLIMIT_FSIZE, (_FULL_AT[fault.which % len(_FULL_AT)], hard))
            self._later(fault.seconds, lambda: _room(target, hard))
        elif fault.kind in PRELOADED:
            flag = self.flush if fault.kind == SQLITE else self.flush.with_name(f"{self.flush.name}.full")
            flag.touch()
            self._later(fault.seconds, lambda: flag.unlink(missing_ok=True))
        elif fault.kind == MEMORY:
            _, hard = target.rlimit(psutil.RLIMIT_AS)
            spare = _SPARE[fault.which % len(_SPARE)]
            target.rlimit(psutil.RLIMIT_AS, (target.memory_info().vms + spare, hard))
            self._later(fault.seconds, lambda: _room(target, hard, psutil.RLIMIT_AS))
        elif fault.kind in CLOCK:
            self._tell(clock=fault.seconds, swings=bool(fault.which % 2))
            self._later(_SWING_SECONDS, lambda: self._tell(swings=False))
        elif fault.kind in FSYNC:
            self._tell(fsync=FSYNC[fault.kind])
            self._later(fault.seconds, lambda: self._tell(fsync=""))
        elif fault.kind in NETWORK and self.proxy is not None:
            self.proxy.make(fault.kind)
            self._later(fault.seconds, lambda: self.proxy and self.proxy.make(""))

    def _crowd(self, fault: Fault, trainer: psutil.Popen) -> str | None:
        with suppress(psutil.NoSuchProcess):
            crowd = strangers([trainer, *trainer.children(recursive=True)], random.Random(fault.which))
            self._later(fault.seconds, lambda: [one.close() for one in crowd])
            return fault.kind if crowd else None
        return None

    def _freeze_waiting(self, fault: Fault, trainer: psutil.Popen) -> str:
        """Suspends the role's processes for a moment, so that requests of the trainer are pending when it is
        frozen. Their answers have arrived when the trainer continues."""
        asked = list(_of_role(trainer, fault.role))
        for one in asked:
            with suppress(psutil.NoSuchProcess):
                one.suspend()
            self._later(_WAITING_SECONDS + 1, functools.partial(_resume, one))
        self._later(_WAITING_SECONDS, functools.partial(_suspend, trainer))
        self._later(_WAITING_SECONDS + fault.seconds, functools.partial(_resume, trainer))
        return "freeze"

    def _lose_machine(self, fault: Fault, target: psutil.Process) -> str | None:
        with suppress(psutil.NoSuchProcess):
            supervisor = target.parent()
            if supervisor is None or not supervisor.cmdline()[0].startswith("ray::Supervisor"):
                return None
            target.suspend()
            supervisor.kill()
            self._later(math.inf, functools.partial(_end, target))
            return f"{fault.kind} {fault.role}"
        return None

    def _later(self, seconds: float, undo: Callable[[], object]) -> None:
        self._lasting.append((time.monotonic() + seconds, lambda: undo() and None))

    def undo(self, everything: bool = False) -> bool:
        """Ends the faults whose time is over; returns whether there were any."""
        due = [one for one in self._lasting if everything or time.monotonic() >= one[0]]
        for one in due:
            self._lasting.remove(one)
            one[1]()
        return bool(due)

    def _tell(self, **wrong: float | str) -> None:
        settings = json.loads(self.shim.read_text()) if self.shim.exists() else {}
        fresh = self.shim.with_suffix(".new")
        fresh.write_text(json.dumps({**settings, **wrong}))
        fresh.replace(self.shim)

    def _kill_and_damage(self, fault: Fault, trainer: psutil.Popen) -> bool:
        """False if the trainer had ended by itself: no writer died, so nothing may be half-written."""
        with suppress(psutil.NoSuchProcess):
            trainer.kill()
        if trainer.wait() != -signal.SIGKILL:
            return False
        (self._tear if fault.kind == "tear" else self._corrupt)(random.Random(fault.which))
        return True

    def _tear(self, chance: random.Random) -> None:
        """What a writer leaves that dies in the middle of a write."""
        for name in ("metrics.jsonl", "spans.jsonl", "dataplane/dead_letters.jsonl"):
            _append(self.run / name, _HALF_A_LINE)
        _append(self.run / "dataplane" / "journal.sqlite-wal", chance.randbytes(chance.randint(1, 9000)))

    def _checkpoints(self) -> list[Path]:
        return sorted((self.run / "checkpoints").glob("step-*"))

    def _corrupt(self, chance: random.Random) -> None:
        """Bytes of the newest checkpoint change; an older one is left to go back to."""
        folders = self._checkpoints()
        files = sorted(path for path in folders[-1].iterdir() if path.is_file() and path.stat().st_size)
        path = chance.choice(files)
        content = bytearray(path.read_bytes())
        if chance.random() < 0.3:
            del content[chance.randrange(len(content)) :]
        else:
            content[chance.randrange(len(content))] ^= 0xFF
        path.chmod(0o600)
        path.write_bytes(bytes(content))


def _append(path: Path, piece: bytes) -> None:
    if path.exists():
        with path.open("ab") as file:
            file.write(piece)


def _suspend(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.suspend()


def _end(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


def _room(process: psutil.Process, hard: int, limit: int = psutil.RLIMIT_FSIZE) -> None:
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        process.rlimit(limit, (hard, hard))


@functools.cache
def flush_library() -> str:
    """`shim/flush.c`, compiled once in this process; empty without a C compiler."""
    if shutil.which("cc") is None:
        return ""
    folder = Path(tempfile.mkdtemp(prefix="understudy-nemesis-shim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = Path(__file__).with_name("shim") / "flush.c"
    library = folder / "flush.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


def _target(fault: Fault, trainer: psutil.Popen) -> psutil.Process | None:
    processes = [trainer] if fault.role == "trainer" else list(_of_role(trainer, fault.role))
    return processes[fault.which % len(processes)] if processes else None


def _of_role(trainer: psutil.Popen, role: str) -> Iterator[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        for child in sorted(trainer.children(recursive=True), key=lambda one: one.pid):
            with suppress(psutil.NoSuchProcess):
                command_line = child.cmdline() or [""]
                titles = ROLES[role]
                if any(word.startswith(titles) for word in command_line) or command_line[0].endswith(titles):
                    yield child
