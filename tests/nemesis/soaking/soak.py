"""One long run of the quickstart with a fault every few seconds: `make soak MINUTES=120`.

The recipe is the quickstart's own, with more steps and more frequent checkpoints. When the time is over, faults
end, the run is resumed with a last `LAST_STEPS` steps over which its learning rate decays, and must end by itself.
Its accuracy is then compared with the teachers', and its history is checked as that of any nemesis run.

    events.jsonl in the folder      one line for each fault, as it is injected
    --out                           figures, written anew every minute; SIGTERM ends the faults early
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parents[1]
sys.path += [str(HERE), str(HERE.parent / "e2e"), str(HERE.parent / "contract" / "teacher")]

from checker import AT_START, History, Launch, Promise, violations  # noqa: E402
from driver import left_behind, processes_of  # noqa: E402
from injection import Injector  # noqa: E402
from reading import read_journal, read_kept, read_letters, read_steps  # noqa: E402
from schedules import MEMORY, POINTS, PRELOADED, Fault, draw_fault  # noqa: E402
from small_runs import ASSETS  # noqa: E402
from starting import start_trainer  # noqa: E402

MODE = "sync full"
LAST_STEPS = 200
STUCK = 900.0
"""Seconds without a finished step after which the soak gives up: the run should have said what it waits for."""
ENDS_A_LAUNCH = {
    "kill",
    "terminate",
    "everything",
    "tear",
    "corrupt",
    "full disk",
    "failing fsync",
    *PRELOADED,
    MEMORY,
}
OVERRIDES = ["trainer.steps=100000", "trainer.checkpoint_every=5", "trainer.eval_every=200", "run.threads=1"]


@dataclass
class Soak:
    folder: Path
    out: Path
    every: float
    chance: random.Random
    until: float
    """Monotonic time at which faults end."""
    started: float = field(default_factory=time.monotonic)
    launches: list[Launch] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    """How often the process to be hit did not exist."""
    memory: dict[str, float] = field(default_factory=dict)
    """Largest resident memory seen of each role, in MB."""
    gave_up: bool = False
    finished: bool = False
    _next: float = 0.0
    _written: float = 0.0

    def __post_init__(self) -> None:
        (self.folder / "tmp").mkdir(parents=True)
        self.injector = Injector(self.folder, None)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def carry_out(self) -> list[str]:
        quickstart = ["train", str(ASSETS / "recipe.toml"), f"run.dir={self.run}", *OVERRIDES]
        try:
            while time.monotonic() < self.until and not self.gave_up:
                begun = (self.run / "recipe.json").exists()
                self.launches.append(self._disturbed(["resume", str(self.run)] if begun else quickstart))
            self.injector.undo(everything=True)
            if not self.gave_up:
                steps = last_step(self.run) + LAST_STEPS
                last = self._start(["resume", str(self.run), f"trainer.steps={steps}"])
                deadline = time.monotonic() + STUCK + 3 * LAST_STEPS
                while last.poll() is None and time.monotonic() < deadline:
                    time.sleep(1)
                self.finished = last.poll() is not None
                self._end(last)
                self.launches.append(Launch(int(last.wait()), (), self._log().read_text(errors="replace")))
            found = self._violations()
        finally:
            for process in processes_of(self.folder):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.write(found)
        return found

    def _disturbed(self, arguments: list[str]) -> Launch:
        hit: list[str] = []
        point = ""
        if self.launches and self.chance.random() < 0.25:
            places = [one for one in POINTS if not one.startswith("async")]
            point = f"{self.chance.choice(places)}:{self.chance.randint(1, 12)}"
            hit.append("point")
        newest, before = _newest_checkpoint(self.run), last_step(self.run)
        trainer = self._start(arguments, point)
        killed_by_driver = False
        fault: Fault | None = None
        progress, seen = time.monotonic(), before
        self._next = self._next or time.monotonic() + self.every
        while trainer.poll() is None:
            time.sleep(0.2)
            self.injector.undo()
            now, step = time.monotonic(), last_step(self.run)
            before = min(before, step)  # a resume removes the metrics of steps that it repeats
            if step != seen:
                progress, seen = now, step
            if now >= self.until:
                if not killed_by_driver:
                    self.injector.undo(everything=True)
                    trainer.terminate()
                    hit.append("terminate")
                    killed_by_driver, progress = True, now
                continue
            if now >= self._next:
                self.missed += fault is not None
                self._next += self.every * (1 + (now - self._next) // self.every)
                self._look(trainer)
                # A launch that has saved nothing yet is seldom killed, so that the run makes progress.
                saved = _newest_checkpoint(self.run) != newest or self.chance.random() < 0.1
                fault = self.draw(may_end=saved)
            if fault is not None and (how := self.injector.inject(fault, trainer)) is not None:
                if step == before and fault.hits_others:
                    how = AT_START
                hit.append(how)
                self._note(fault)
                killed_by_driver |= how in ("kill", "terminate")
                fault = None
            if now - progress > STUCK:
                self.gave_up = True
                self._keep_waits()
                self._end(trainer)
        self.injector.undo(everything=True)
        if point and trainer.returncode == -9 and not killed_by_driver:
            self._note(Fault("point", place=point))
        return Launch(int(trainer.returncode), tuple(hit), self._log().read_text(errors="replace"))

    def _start(self, arguments: list[str], point: str = "") -> psutil.Popen:
        more = {"UNDERSTUDY_NEMESIS_FLUSH": str(self.injector.flush)}
        if point:
            more["UNDERSTUDY_FAULT"] = point
        return start_trainer(arguments, self.folder, self.injector.shim, self._log(), more)

    def _log(self) -> Path:
        return self.folder / f"launch{len(self.launches):04d}.log"

    def _end(self, trainer: psutil.Popen) -> None:
        if trainer.poll() is None:
            trainer.kill()

    def draw(self, may_end: bool) -> Fault:
        while True:
            fault = draw_fault(self.chance, MODE)
            ends = fault.role == "trainer" and fault.kind in ENDS_A_LAUNCH
            if fault.kind != "point" and (may_end or not ends):
                return replace(fault, after=0, delay=0.0)

    def _note(self, fault: Fault) -> None:
        self.faults[f"{fault.kind} {fault.role}"] += 1
        line = {
            "minute": round((time.monotonic() - self.started) / 60, 2), "launch": len(self.launches), "step": last_step(self.run),
            "fault": f"{fault.kind} {fault.role}", "seconds": fault.seconds, "place": fault.place,
        }  # fmt: skip
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if time.monotonic() - self._written > 60:
            self.write(None)

    def _look(self, trainer: psutil.Popen) -> None:
        with suppress(psutil.Error):
            for process in [trainer, *trainer.children(recursive=True)]:
                role = "trainer" if process.pid == trainer.pid else "another process"
                size = process.memory_info().rss / 1e6
                self.memory[role] = max(self.memory.get(role, 0.0), size)

    def _keep_waits(self) -> None:
        with suppress(OSError):
            print("stuck:", (self.run / "waits.json").read_text()[:2000], flush=True)

    def _violations(self) -> list[str]:
        left = left_behind(self.folder)
        events, in_flight = read_journal(self.run / "dataplane")
        letters = read_letters(self.run / "dataplane")
        history = History(
            self.launches, events, in_flight, read_steps(self.run), letters, read_kept(self.run), {}, left, self.finished and not self.gave_up
        )  # fmt: skip
        return violations(history, History(), Promise(last_step(self.run), False, False, None))

    def write(self, found: list[str] | None) -> None:
        """The figures so far; `found` is None while the soak goes on."""
        self._written = time.monotonic()
        minutes = (min(self._written, self.until) - self.started) / 60
        rows = [
            _row("minutes with a fault every 15 s" if self.every == 15 else f"minutes with a fault every {self.every:g} s", round(minutes, 1), "min", "120", minutes >= 120),
            _row("faults that hit", sum(self.faults.values()), "faults"),
            *(_row(f"of these: {name}", count, "faults") for name, count in sorted(self.faults.items())),
            _row("moments without a process to hit", self.missed, ""),
            _row("launches", len(self.launches), "launches"),
            _row("steps", last_step(self.run), "steps"),
            *(_row(f"largest memory: {role}", round(size), "MB") for role, size in sorted(self.memory.items())),
        ]  # fmt: skip
        if found is not None:
            rows += [*accuracies(read_steps(self.run)), _row("violations", len(found), "", "0", not found)]
        self.out.write_text(json.dumps(rows, indent=1) + "\n")


def accuracies(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The student's last accuracy of each task beside its teacher's."""
    last: dict[str, Any] = {}
    for line in lines:
        last |= {key: value for key, value in line.items() if key.startswith("val/")}
    rows = []
    for key, teacher in sorted(last.items()):
        if source := key.partition("val/teacher_accuracy/")[2]:
            own = last[f"val/accuracy/{source}"]
            rows.append(
                {
                    **_row(f"accuracy: {source}", own, "", "its teacher's, less 1 %", own >= teacher - 0.01),
                    "peer": "its teacher", "peer_value": teacher, "ratio": round(own / teacher, 4),
                }
            )  # fmt: skip
    return rows


def _row(name: str, value: float, unit: str, goal: str = "", met: bool | None = None) -> dict[str, Any]:
    return {
        "name": name, "value": value, "unit": unit, "peer": "", "peer_value": None, "ratio": None, "goal": goal, "met": met,
    }  # fmt: skip


def _newest_checkpoint(run: Path) -> str:
    return max((path.name for path in (run / "checkpoints").glob("step-*")), default="")


def last_step(run: Path) -> int:
    """The step of the last whole line of metrics, read from the end of the file: it is long."""
    with suppress(OSError), (run / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - (64 << 10)))
        for line in reversed(file.read().split(b"\n")):
            with suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0, help="how long faults are injected")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="a fresh folder; the run is kept there")
    parser.add_argument("--out", type=Path, default=Path("soak.json"), help="where the figures go")
    options = parser.parse_args()
    soak = Soak(
        options.folder.resolve(), options.out, options.every, random.Random(options.seed), time.monotonic() + options.minutes * 60
    )  # fmt: skip

    def end_faults(*_: object) -> None:
        soak.until = min(soak.until, time.monotonic())

    signal.signal(signal.SIGTERM, end_faults)
    found = soak.carry_out()
    print(*(f"violation: {one}" for one in found), sep="\n")
    print(
        f"{sum(soak.faults.values())} faults, {len(soak.launches)} launches, {len(found)} violations; {soak.out}"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
