"""A schedule of faults, drawn from a seed, and how a failing one is made smaller."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from modes import MODES, STEPS

POINTS = (
    "sync.after_produce", "sync.after_update", "sync.after_ack", "sync.after_metrics", "sync.after_checkpoint",
    "async.after_claim", "async.after_update", "async.after_publish", "async.after_ack", "async.after_metrics",
    "checkpoint.before_model", "checkpoint.before_optimizer", "checkpoint.before_state",
    "checkpoint.before_manifest", "checkpoint.before_rename", "checkpoint.before_latest", "checkpoint.saved",
    "journal.before_commit", "journal.after_commit", "settle.before_commit", "settle.after_commit",
    "rewind.before_commit", "rewind.after_commit", "kept_rows.between_files",
)  # fmt: skip
"""Places in the trainer's code (`observability/faults.py`) at which it may be killed."""


@dataclass(frozen=True)
class Fault:
    kind: str
    """kill, terminate or freeze a process; tear: kill the trainer and leave half a line at the end of its files;
    point: the next trainer to be started kills itself at `place`, if it comes there."""
    role: str = "trainer"
    after: int = 0
    """Steps whose metrics are written before the fault."""
    delay: float = 0.0
    """Seconds from then on, or from the start of the trainer if that is later; a start takes about ten."""
    which: int = 0
    """Of several processes of the role."""
    seconds: float = 0.0
    """How long a process stays frozen."""
    place: str = ""
    """point: the place, and after which call of it."""


@dataclass(frozen=True)
class Schedule:
    mode: str
    faults: tuple[Fault, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> Schedule:
        return cls(written["mode"], tuple(Fault(**fault) for fault in written["faults"]))


def draw(seed: int, mode: str | None = None) -> Schedule:
    """The schedule of a seed. Seeds go through the modes in turn, unless one is given."""
    chance = random.Random(seed)
    name = mode or list(MODES)[seed % len(MODES)]
    faults = sorted((_fault(chance, name) for _ in range(chance.randint(1, 6))), key=lambda one: one.after)
    return Schedule(name, tuple(faults))


def _fault(chance: random.Random, mode: str) -> Fault:
    after = chance.randrange(STEPS)
    delay = round(chance.uniform(0, 12) if after == 0 else chance.choice((0.0, chance.uniform(0, 0.6))), 2)
    role = chance.choice(MODES[mode].roles)
    kind = chance.choices(("kill", "terminate", "freeze", "tear", "point"), (4, 2, 3, 1, 3))[0]
    if kind == "point":
        own = "async" if MODES[mode].staleness is not None else "sync"
        places = [one for one in POINTS if one.split(".")[0] not in {"sync", "async"} - {own}]
        return Fault("point", after=after, place=f"{chance.choice(places)}:{chance.randint(1, 6)}")
    if kind == "tear":
        return Fault("tear", after=after, delay=delay)
    seconds = chance.choice((chance.uniform(0.1, 1), chance.uniform(1, 5), 20.0)) if kind == "freeze" else 0.0
    return Fault(kind, role, after, delay, chance.randrange(2), round(seconds, 2))


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with one fault less, and with one fault made simpler."""
    for index in range(len(schedule.faults)):
        yield replace(schedule, faults=schedule.faults[:index] + schedule.faults[index + 1 :])
    for index, fault in enumerate(schedule.faults):
        for simple in {replace(fault, delay=0.0), replace(fault, after=0)} - {fault}:
            yield replace(schedule, faults=(*schedule.faults[:index], simple, *schedule.faults[index + 1 :]))


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], tries: int = 20) -> Schedule:
    """The smallest schedule found that still fails, after at most this many trials."""
    found = True
    while found:
        found = False
        for candidate in smaller(schedule):
            if tries == 0:
                return schedule
            tries -= 1
            if candidate.faults and fails(candidate):
                schedule, found = candidate, True
                break
    return schedule
