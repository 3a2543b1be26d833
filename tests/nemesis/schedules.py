"""A schedule of faults, drawn from a seed, and how a failing one is made smaller."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from modes import CHECKPOINT_EVERY, MODES, STEPS

POINTS = (
    "sync.after_produce", "sync.after_update", "sync.after_ack", "sync.after_metrics", "sync.after_checkpoint",
    "async.after_claim", "async.after_update", "async.after_publish", "async.after_ack", "async.after_metrics",
    "checkpoint.before_model", "checkpoint.before_optimizer", "checkpoint.before_state",
    "checkpoint.before_manifest", "checkpoint.before_rename", "checkpoint.before_latest", "checkpoint.saved",
    "journal.before_commit", "journal.after_commit", "settle.before_commit", "settle.after_commit",
    "rewind.before_commit", "rewind.after_commit", "kept_rows.between_files", "sync.after_publish",
    "evaluation.answered", "checkpoint.before_prune", "row_journal.after_put", "journal.before_begin",
    "dead_letters.before_append", "journal.before_create", "journal.before_checkpoint",
)  # fmt: skip
"""Places in the trainer's code (`observability/faults.py`) at which it may be killed."""
CLOCK = ("clock",)
FSYNC = {"slow fsync": "slow", "failing fsync": "fail"}
SQLITE = "failing sqlite flush"
FULL_JOURNAL = "full journal"
PRELOADED = (SQLITE, FULL_JOURNAL)
"""Need a C compiler (`shim/flush.c`)."""
MEMORY = "no memory"
"""Only if it is asked for (`--only`): a reward that gets no memory is a dead letter, so bits may differ. Of any process."""
STRANGERS = "strangers"
"""Only if it is asked for: ports of ranks have no authentication (docs/cluster.md)."""
FREEZE_WAITING = "freeze waiting"
"""Only if it is asked for: each takes 75 s."""
LOST_MACHINE = "lost machine"
"""Only if it is asked for: needs a process with a machine of its own (modes on Ray)."""
ASKED_FOR = (MEMORY, STRANGERS, FREEZE_WAITING, LOST_MACHINE)
NETWORK = ("partition", "delay", "reset", "damage")
BEYOND_DEADLINES = 75.0
"""Seconds that a process is frozen for at most: longer than a request's deadline in these recipes, and than the silence after
which a process counts as lost (`serving/supervisor.py`)."""
START_SECONDS = 3.0
"""A forked trainer and its processes take one to three seconds to start."""
MOST = 9
"""Faults of a schedule. Some come too late, or their process is not there: about two in three hit."""
KINDS = {
    "kill": 4, "terminate": 2, "freeze": 3, "point": 3, "tear": 1, "corrupt": 1, "everything": 1,
    "full disk": 1, "failing fsync": 1, "slow fsync": 1, "clock": 1,
    SQLITE: 1, FULL_JOURNAL: 1,
}  # fmt: skip
"""Kinds of faults, and how often each is drawn."""


@dataclass(frozen=True)
class Fault:
    kind: str
    """kill, terminate, freeze: sends a signal to a process.
    everything: kills all processes of the run at once.
    tear: kills the trainer and leaves half a write at the end of its files.
    corrupt: kills the trainer and damages the newest checkpoint.
    point: the next trainer to be started kills itself at `place`, if it gets there.
    full disk: no file of the trainer can grow.
    failing fsync, slow fsync: of the trainer, in Python.
    failing sqlite flush: of the journal's files, in C.
    full journal: only the journal's files cannot be written, so that steps may be saved meanwhile.
    no memory: the process gets no more memory than it has.
    freeze waiting: freezes the trainer, beyond the deadlines of its requests, while it waits for processes of the role.
    lost machine: a process on Ray is suspended for good with its connections open, and its supervisor is killed, as if
      their machine had lost power.
    strangers: connections to every port of the run that send other bytes than a client would, and stay open.
    clock: `time.time` jumps by `seconds`; with an odd `which` back and forth for ten seconds.
    partition, delay, reset, damage: of connections to the external teacher or between the run's own processes."""
    role: str = "trainer"
    after: int = 0
    """Steps whose metrics are written before the fault."""
    delay: float = 0.0
    """Seconds after that, or after the start of the trainer if that is later."""
    which: int = 0
    """Chooses one of several processes of the role."""
    seconds: float = 0.0
    """How long the fault lasts, or by how much the clock jumps."""
    place: str = ""
    """point: the place, and after which call of it."""

    @property
    def hits_others(self) -> bool:
        """Processes other than the trainer, or the network."""
        return (self.role != "trainer" and self.kind != FREEZE_WAITING) or self.kind in NETWORK

    @property
    def ends_trainer(self) -> bool:
        """At once, by a signal."""
        return self.role == "trainer" and self.kind in ("kill", "everything", "tear", "corrupt")


@dataclass(frozen=True)
class Schedule:
    mode: str
    faults: tuple[Fault, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> Schedule:
        return cls(written["mode"], tuple(Fault(**fault) for fault in written["faults"]))


def draw(seed: int, mode: str | None = None, most: int = MOST, only: Collection[str] = ()) -> Schedule:
    """The schedule of a seed, with half of `most` faults at least. Seeds go through the modes in turn, unless one is given.
    `only`: faults of these kinds, or of these kinds and roles ("kill replica")."""
    chance = random.Random(seed)
    by_seed = [name for name, own in MODES.items() if own.by_seed]
    name = mode or by_seed[seed % len(by_seed)]
    faults: list[Fault] = []
    asked = {kind for kind in ASKED_FOR for one in only if f"{one} ".startswith(f"{kind} ")}

    def drawn() -> Fault:
        while True:
            fault = draw_fault(chance, name, [kind for kind in ASKED_FOR if kind in asked])
            if not only or {fault.kind, f"{fault.kind} {fault.role}"} & set(only):
                return fault

    count = chance.randint(max(1, most // 2), most)
    while len(faults) < count:
        fault = drawn()
        faults.append(fault)
        if chance.random() < 0.15 and len(faults) < most:  # another one at the same time
            faults.append(replace(drawn(), after=fault.after, delay=0.0))
    return Schedule(name, tuple(sorted(faults, key=lambda one: one.after)))


def draw_fault(chance: random.Random, mode: str, asked_for: Collection[str] = ()) -> Fault:
    after = chance.randrange(STEPS)
    delay = round(
        chance.uniform(0, START_SECONDS) if after == 0 else chance.choice((0.0, chance.uniform(0, 0.4))), 2
    )
    others = MODES[mode].roles[1:]
    # Half of the faults of a process hit the newest kind of process that the mode has.
    role = chance.choice(("trainer", *others, *others[-1:]))
    networked = MODES[mode].external or MODES[mode].proxied
    weights = {**KINDS, **(dict.fromkeys(NETWORK, 3) if networked else {}), **dict.fromkeys(asked_for, 3)}
    kind = chance.choices(list(weights), list(weights.values()))[0]
    which = chance.randrange(100)
    if kind == "clock" and which % 2:  # deadlines are longest while processes start
        after, delay = 0, round(chance.uniform(0, START_SECONDS), 2)
    if role == "fork server":  # it lives while processes start
        after, delay = 0, round(chance.uniform(0, 3), 2)
    if kind == "corrupt":  # the newest of two checkpoints
        after = max(after, 2 * CHECKPOINT_EVERY)
    if kind == "point":
        own = "async" if MODES[mode].staleness is not None else "sync"
        places = [one for one in POINTS if one.split(".")[0] not in {"sync", "async"} - {own}]
        place = chance.choice(places)
        often = 1 if place.startswith(("rewind", "evaluation", "journal.before_c")) else 3
        after = chance.choice((int(place.startswith("rewind")), after))  # a launch must follow it
        return Fault("point", after=after, place=f"{place}:{chance.randint(1, often)}")
    if kind in ("kill", "terminate"):
        return Fault(kind, role, after, delay, which)
    if kind == "freeze":
        longest = BEYOND_DEADLINES if which % 2 else 20.0
        short, some = chance.uniform(0.1, 1), chance.uniform(1, 5)
        seconds = chance.choices((short, some, longest), (3, 2, 1))[0]
        return Fault(kind, role, after, delay, which, round(seconds, 2))
    if kind == "clock":
        return Fault(
            kind, "trainer", after, delay, which, chance.choice((-1e6, -3600.0, -5.0, 5.0, 3600.0, 1e6))
        )
    if kind == FREEZE_WAITING:
        asked_role = role if role != "trainer" else others[0]
        return Fault(kind, asked_role, min(max(after, 1), STEPS - 2), delay, which, BEYOND_DEADLINES)
    if kind == LOST_MACHINE:
        return Fault(
            kind, "remote worker" if "remote worker" in others else others[0], max(after, 1), delay, which
        )
    # A step takes a fifth of a second: a short fault ends before the next checkpoint.
    lasting = kind in (*FSYNC, *NETWORK, *PRELOADED, *ASKED_FOR, "full disk")
    lasts = round(chance.choice((chance.uniform(0.05, 0.5), chance.uniform(0.5, 8))), 2) if lasting else 0.0
    return Fault(kind, role if kind == MEMORY else "trainer", after, delay, which, lasts)


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
