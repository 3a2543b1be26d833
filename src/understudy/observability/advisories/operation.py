"""Rules on how a run runs: waits, restarts, dead letters, checkpoints, the disk."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

from understudy.observability.advisories.facts import WINDOW, Advisory, Rule, RunFacts
from understudy.observability.report import many

SLOWER, SLOW_SECONDS = 3.0, 0.1
"""A teacher's latency over the median of the other teachers'; latencies below this matter to no run."""
TRAINER_IDLE, TEACHER_IDLE = 0.3, 0.95
"""Share of the time without work in a fully asynchronous run."""
RESTARTS = 3
"""Restarts of one replica that are more than an accident."""
DEAD_SHARE = 0.01
"""Share of rows that became dead letters; the default of `trainer.max_dead_letters`."""
LOW_DISK, CHECKPOINTS_LEFT = 1 << 30, 3
"""Free bytes below which the disk counts as low, or below this many more checkpoints."""
CHECKPOINT_SHARE = 0.2
"""Share of the time of steps and checkpoints together in which the trainer saved or waited for the disk."""


def slow_teacher(facts: RunFacts) -> Iterator[Advisory]:
    levels = {
        name: median(one.last(WINDOW))
        for name, one in facts.history.named("perf/teacher/", "/latency_mean").items()
        if len(one) >= WINDOW
    }
    for name, level in levels.items():
        others = [other for who, other in levels.items() if who != name and other > 0]
        if others and level > SLOW_SECONDS and level > SLOWER * median(others):
            yield Advisory(
                "slow_teacher", "note", f"Teacher {name} is {level / median(others):.1f} × slower than the others",
                f"{level:.2f} s a request, the others {median(others):.2f} s, last {WINDOW} steps",
                f"Raise teachers.{name}.replicas, or give it a device or a pool of its own.",
                (f"perf/teacher/{name}/latency_mean",),
            )  # fmt: skip


def idle(facts: RunFacts) -> Iterator[Advisory]:
    for side, limit, turn in (
        ("trainer", TRAINER_IDLE, "Add engines (rollout.processes) or teacher replicas, or raise trainer.max_staleness."),
        ("teacher", TEACHER_IDLE, "Fewer replicas would do; their devices may serve the engines."),
    ):  # fmt: skip
        key = f"perf/async/{side}_idle"
        seen = facts.history.get(key)
        if len(seen) >= WINDOW and (share := mean(seen.last(WINDOW))) >= limit:
            yield Advisory(
                f"{side}_idle", "note", f"The {side} is idle {share:.0%} of the time",
                f"mean of the last {WINDOW} steps", turn, (key,),
            )  # fmt: skip


def restarting_replica(facts: RunFacts) -> Iterator[Advisory]:
    for key, seen in facts.history.series.items():
        parts = key.split("/")
        if parts[:2] == ["perf", "teacher"] and parts[-1] == "restarts" and (count := max(seen.values)) > 0:
            yield Advisory(
                "restarting_replica", "warning" if count >= RESTARTS else "note",
                f"Replica {parts[3]} of teacher {parts[2]} was restarted {count:.0f} ×",
                f"{key}, first at step {next(s for s, v in zip(seen.steps, seen.values, strict=True) if v)}",
                f"Read the end of logs/teacher-{parts[2]}-{parts[3]}.log.", (key,),
            )  # fmt: skip


def dead_letters(facts: RunFacts) -> Iterator[Advisory]:
    counted = dict(facts.dead_letters)
    if not counted:
        for reason, seen in facts.history.named("rows/dead_letters/").items():
            counted[reason] = int(sum(seen.values))
    dead, rows = sum(counted.values()), sum(facts.history.get("rollout/rows").values)
    if dead:
        share = dead / (dead + rows)
        reasons = sorted(counted.items(), key=lambda item: -item[1])
        yield Advisory(
            "dead_letters", "warning" if share >= DEAD_SHARE else "note",
            f"{many(dead, 'row')} ({share:.1%}) could not be made or trained",
            ", ".join(f"{count} × {reason}" for reason, count in reasons[:4]),
            "Read dataplane/dead_letters.jsonl; trainer.max_dead_letters bounds them.", ("rows/dead_letters",),
        )  # fmt: skip


def checkpoints_slow(facts: RunFacts) -> Iterator[Advisory]:
    """A step's line holds the checkpoint before it, which its `time/step` leaves out."""
    saved, steps = facts.history.get("time/checkpoint"), facts.history.get("time/step")
    seconds, whole = sum(saved.values), sum(saved.values) + sum(steps.values)
    if len(saved.values) > 1 and seconds > CHECKPOINT_SHARE * whole:
        yield Advisory(
            "checkpoints_slow", "note",
            f"Checkpoints took {seconds / whole:.0%} of the time",
            f"{seconds:.0f} of {whole:.0f} s in {len(saved.values)} saves of {_size(facts.checkpoint_bytes)}; a save waits until the one before it is on the disk",
            f"Raise trainer.checkpoint_every ({facts.key('trainer.checkpoint_every')}), or put run.dir on a faster disk.",
            ("time/checkpoint", "time/step"),
        )  # fmt: skip


def disk_low(facts: RunFacts) -> Iterator[Advisory]:
    if facts.free_bytes is None:
        return
    need = max(LOW_DISK, CHECKPOINTS_LEFT * facts.checkpoint_bytes)
    if facts.free_bytes < need:
        yield Advisory(
            "disk_low", "warning", "The disk of the run directory is nearly full",
            f"{_size(facts.free_bytes)} free, a checkpoint takes {_size(facts.checkpoint_bytes)}",
            "Free space, or lower trainer.keep_checkpoints and run.rollout_dump_every.",
        )  # fmt: skip


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"


RULES: tuple[Rule, ...] = (
    slow_teacher,
    idle,
    restarting_replica,
    dead_letters,
    checkpoints_slow,
    disk_low,
)
