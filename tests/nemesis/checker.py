"""Compares the history of a disturbed run with what the system promises.

A history is read from what the run left behind: the journal's append-only events, the metrics, the dead
letters, the kept rows, the spans, the last checkpoint, and what the driver saw of its processes. `violations` is a pure
function of two histories, the disturbed run's and an undisturbed one's of the same recipe. It uses none of
the package's own accounting.

Why an empty answer means that nothing was lost or trained twice. Let e1 … en be the journal's events in the
order of their commit; each adds +1 or −1 (a rewind to a checkpoint) to a count of its (key, kind). The checker
folds over them and demands after every one of them

    0 ≤ trained(key) + dead(key) + evicted(key) ≤ issued(key) ≤ 1.

So at no moment was a row settled twice, or settled without having been issued. At the end it demands that
every issued row is settled, or in flight and beyond the last step. Each step has as many trained rows as its
metrics say, and the metrics have one line for each step 1 … N. Kept rows, a sample of each step, have the scores that a
plain forward of their teacher's model gives. With a recipe that promises bits, weights,
optimizer and metrics are those of the undisturbed run, so the rows trained are too.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SETTLED = ("trained", "dead", "evicted")
STOP_CODES = {0, 130, 143}
"""How a trainer may end after SIGTERM: finished, or stopped with its state saved."""


AT_START = "another process, before the launch's first step"
"""A launch may end with 2 and that process's name if one of its processes is lost while they start."""
UNREACHED = "the network, before the launch's first step"
"""A launch may end with 2 and the name of the teacher that it cannot reach."""
RESTARTS = 1
"""Lost ranks and critics that a launch survives between two checkpoints: the default of `cluster.restarts.student`. After one
more it may end with 2 and say that `understudy resume` continues."""
TRIES, GIVEN_UP = 3, "its worker process died 3 times"
"""A session whose worker is lost so often becomes a dead letter with this reason (`rollout/workers/pool.py`)."""
LOST_MACHINE = r"machine \S+, the only one of the run's own Ray, is lost"
"""A Ray of the run's own has one node. If it is lost, the launch may end with 2 and name it."""
GIVEN_UP_ON = "given up"
"""The driver ended the launch, as it took too long. No fault excuses that."""
DISK = "the disk"
"""A launch may end with 2 and say that it could not write."""
NO_MEMORY = "the memory"
"""A launch may end with 2 and say that there was no memory, or by a signal of native code that got none."""
NO_MEMORY_OF = "no memory "
"""And a role: another process got none. It may end, and is started again; or the launch ends with 2 and the name of that
process, without a stack. A row whose reward or tool got none may be a dead letter that says so."""
_LACKS_MEMORY = r"out of memory|no memory|MemoryError|allocate memory|start new thread"
_STACK = "Traceback (most recent call last)"
_ROUNDING = 1e-3
"""Nats by which a teacher's score may differ from a plain forward of its model in float32."""
_CLOCK = 1e-5
"""Seconds; spans are rounded."""
_CANNOT_WRITE = r"cannot be (written|flushed|checkpointed)|could not save|No space left|File too large|Input/output error|disk I/O error"


@dataclass(frozen=True)
class Event:
    kind: str
    key: str
    sign: int
    step: int | None = None


@dataclass(frozen=True)
class Launch:
    code: int
    faults: tuple[str, ...]
    """Kinds of the faults that hit the trainer itself; of those that hit another process, with its role, or `AT_START`."""
    output: str = ""


@dataclass(frozen=True)
class Promise:
    steps: int
    to_the_bit: bool
    same_rows: bool
    staleness: float | None


@dataclass(frozen=True)
class History:
    launches: Sequence[Launch] = ()
    events: Sequence[Event] = ()
    in_flight: frozenset[str] = frozenset()
    metrics: Sequence[Mapping[str, Any]] = ()
    """Lines without clocks."""
    letters: Mapping[str, str] = field(default_factory=dict)
    kept: Sequence[Mapping[str, Any]] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Digests of the last checkpoint's weights and optimizer."""
    left_behind: Sequence[str] = ()
    """Processes and temporary files of the run after its end."""
    finished: bool = True
    """The run ended within the time allowed after the last fault."""
    unreadable: Sequence[str] = ()
    """Files of the run that could not be read after its end, with the error."""
    spans: Sequence[Mapping[str, Any]] = ()
    """What the trainer did in each launch, with its own clock: name, start, end, launch, key or step."""


def violations(found: History, expected: History, promise: Promise) -> list[str]:
    if _sessions_given_up(found) or _memory_cost_rows(found):
        promise = replace(promise, to_the_bit=False, same_rows=False)
    return [
        *_endings(found),
        *_accounting(found.events, found.in_flight),
        *_metrics(found, promise),
        *_letters(found),
        *_kept(found),
        *_order(found),
        *(f"left behind: {one}" for one in found.left_behind),
        *(f"a file is damaged: {one}" for one in found.unreadable),
        *_same(found, expected, promise),
    ]


def _endings(found: History) -> Iterator[str]:
    if not found.finished:
        yield "the run did not end within the time allowed after the last fault"
    for number, launch in enumerate(found.launches, start=1):
        allowed = {0}
        if {"kill", "point"} & set(launch.faults):
            allowed.add(-9)
        if "terminate" in launch.faults:
            allowed |= STOP_CODES | {-9, -15}
        if AT_START in launch.faults and re.search(
            rf"(ended with|exit) code -?\d+|process \S+ was killed by SIG|Ray .* cannot be used|teacher \w+, replica \w+ did not|{LOST_MACHINE}",
            launch.output,
        ):
            allowed.add(2)
        if _lost(launch) > RESTARTS and "continues from the last checkpoint" in launch.output:
            allowed.add(2)
        if any(one.endswith(" node") for one in launch.faults) and re.search(LOST_MACHINE, launch.output):
            allowed.add(2)
        if GIVEN_UP_ON in launch.faults:
            allowed.clear()
        if UNREACHED in launch.faults and re.search(r"teacher (add|sort)", launch.output):
            allowed.add(2)
        if DISK in launch.faults and re.search(_CANNOT_WRITE, launch.output):
            allowed.add(2)
        if NO_MEMORY in launch.faults:
            allowed |= {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}
        if NO_MEMORY in launch.faults and re.search(r"out of memory|no memory", launch.output):
            allowed.add(2)
        short = any(one.startswith(NO_MEMORY_OF) for one in launch.faults)
        if (
            short
            and re.search(rf"{_LACKS_MEMORY}|code -?\d+|killed by SIG", launch.output)
            and _STACK not in launch.output
        ):
            allowed.add(2)
        if launch.code not in allowed:
            yield f"launch {number} ended with {launch.code}, hit by {list(launch.faults)}: {launch.output[-600:]}"


def _sessions_given_up(found: History) -> bool:
    """Whether workers were lost so often that a session was given up: its row may be what ends them."""
    often = any(sum(one.endswith(" worker") for one in launch.faults) >= TRIES for launch in found.launches)
    return often and any(GIVEN_UP in reason for reason in found.letters.values())


def _memory_cost_rows(found: History) -> bool:
    short = any(
        one == NO_MEMORY or one.startswith(NO_MEMORY_OF) for launch in found.launches for one in launch.faults
    )
    return short and any(re.search(_LACKS_MEMORY, reason) for reason in found.letters.values())


def _lost(launch: Launch) -> int:
    """How many faults may have cost the launch a rank or the critic."""
    return sum(one == AT_START or one.endswith((" rank", " critic")) for one in launch.faults)


def _accounting(events: Sequence[Event], in_flight: frozenset[str]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for number, event in enumerate(events):
        counts[event.key, event.kind] += event.sign
        issued = counts[event.key, "issued"]
        settled = sum(counts[event.key, kind] for kind in SETTLED)
        lowest = min(counts[event.key, kind] for kind in (*SETTLED, "issued"))
        if not (lowest >= 0 and settled <= issued <= 1):
            yield (
                f"event {number} ({event.kind} {event.sign:+d}): row {event.key} is issued {issued} times and"
                f" settled {settled} times"
            )
            return
    for key in {key for key, _ in counts}:
        settled = sum(counts[key, kind] for kind in SETTLED)
        if settled + (key in in_flight) != counts[key, "issued"]:
            yield f"row {key} is issued {counts[key, 'issued']} times, settled {settled} times, in flight: {key in in_flight}"


def _metrics(found: History, promise: Promise) -> Iterator[str]:
    steps = [line["step"] for line in found.metrics if "actor/loss" in line]
    if steps != list(range(1, promise.steps + 1)):
        yield f"metrics have lines of the steps {steps}; expected 1 to {promise.steps}, once each and in order"
    trained: Counter[int | None] = Counter()
    for event in found.events:
        if event.kind == "trained":
            trained[event.step] += event.sign
    if {step for step, rows in trained.items() if rows} != set(range(1, promise.steps + 1)):
        yield f"rows were trained in the steps {sorted(step for step, rows in trained.items() if rows and step)}"
    for line in found.metrics:
        age = line.get("async/staleness/max")
        if age is not None and promise.staleness is not None and age > promise.staleness:
            yield f"step {line['step']} trained a row of age {age}; the bound is {promise.staleness}"


def _letters(found: History) -> Iterator[str]:
    dead: Counter[str] = Counter()
    for event in found.events:
        if event.kind == "dead":
            dead[event.key] += event.sign
    if {key for key, count in dead.items() if count} != set(found.letters):
        yield f"the journal has dead rows {sorted(+dead)}, dead_letters.jsonl has {sorted(found.letters)}"
    for key, reason in found.letters.items():
        others = [other for other in found.letters if other != key and other in reason]
        if others:
            yield f"the dead letter of {key} has the reason of {others[0]}: {reason}"


def _kept(found: History) -> Iterator[str]:
    for row in found.kept:
        if row.get("teacher") and row["teacher"] != row["source"]:
            yield f"row {row['key']} of {row['source']} was scored by {row['teacher']}"
        if row.get("apart", 0.0) > _ROUNDING:
            yield f"row {row['key']}: its scores are {row['apart']:.2g} nats from those of its teacher {row['teacher']}"
        oldest, newest = row.get("oldest"), row.get("newest")
        if oldest is not None and not 0 <= oldest <= newest < row["step"]:
            yield f"row {row['key']} of step {row['step']} was written by the weights {oldest} to {newest}"


def _order(found: History) -> Iterator[str]:
    """Within a launch a row is written, then scored, then trained; a step is trained, then published and saved. Spans may be
    missing, so only those that are there are compared. A launch may do a step again, after a rewind. A failing disk may cost
    the lines that tell launches apart."""
    if any(DISK in launch.faults for launch in found.launches):
        return
    begun: dict[tuple[int, str, Any], list[float]] = {}
    ended: dict[tuple[int, str, Any], list[float]] = {}
    for span in found.spans:
        about = (span["launch"], span["name"], span.get("key", span.get("step")))
        begun.setdefault(about, []).append(span["start"])
        ended.setdefault(about, []).append(span["end"])
    # A later launch may train a row in a step that this one made before it had the row.
    trained = found.events if len(found.launches) == 1 else ()
    steps = {event.key: event.step for event in trained if event.kind == "trained" and event.sign > 0}
    for (launch, name, about), starts in begun.items():
        before = {"score": "rollout", "publish": "update", "checkpoint": "update"}.get(name)
        if before and (ends := ended.get((launch, before, about))) and min(starts) < min(ends) - _CLOCK:
            yield f"launch {launch}: {name} of {about} began before the first {before} of it had ended"
        updates = begun.get((launch, "update", steps.get(about))) if name == "score" else None
        if updates and max(updates) < min(ended[launch, name, about]) - _CLOCK:
            yield f"launch {launch}: row {about} was trained before it was scored"


def _same(found: History, expected: History, promise: Promise) -> Iterator[str]:
    if promise.to_the_bit:
        if found.files != expected.files:
            yield f"the last checkpoint differs in {[name for name in expected.files if found.files.get(name) != expected.files[name]]}"
        if list(found.metrics) != list(expected.metrics):
            pairs = zip(found.metrics, expected.metrics, strict=False)
            first = next((one["step"] for one, other in pairs if one != other), "their number")
            yield f"metrics differ from the undisturbed run's, first at step {first}"
        if found.letters != expected.letters:
            yield f"dead letters {sorted(found.letters)} instead of {sorted(expected.letters)}"
    if promise.same_rows:
        mine, theirs = _trained(found.events), _trained(expected.events)
        if mine != theirs:
            yield f"other rows were trained: more {sorted(mine - theirs)[:3]}, fewer {sorted(theirs - mine)[:3]}"


def _trained(events: Sequence[Event]) -> set[str]:
    counts: Counter[str] = Counter()
    for event in events:
        if event.kind == "trained":
            counts[event.key] += event.sign
    return {key for key, count in counts.items() if count}
