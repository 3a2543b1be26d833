"""SIGKILL at named points and at random moments: what was acknowledged is kept, every row is trained exactly once.

Zero failures in n random trials bound the failure rate at 95 % confidence by 1 − 0.05^(1/n): 8 trials ≤ 31 %,
300 trials ≤ 1 %. The named points are between every two writes and do not depend on chance.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from journal_child import (
    BOUNDS,
    STEPS,
    is_poison,
    keys_of,
    load_checkpoint,
    rollout_of,
    score_of,
    train_until_killed,
)

from understudy.dataplane.base import Retain
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.dataplane.ledger import Ledger, audit
from understudy.types.batch import BatchMeta

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["understudy.dataplane.embedded"])
POINTS = [
    "journal.before_create",
    "journal.before_spill",
    "journal.before_begin",
    "journal.before_commit",
    "journal.after_commit",
    "journal.before_sweep",
    "rewind.before_commit",
    "rewind.after_commit",
    "settle.before_commit",
    "settle.after_commit",
    "dead_letters.before_append",
]


def run_child(
    folder: Path, keep_rows: bool, retain: Retain, fault: str = "", kill_after: float | None = None
) -> tuple[list[tuple[str, Any]], int]:
    """Runs the trainer once; returns what it reported as acknowledged, and its exit code."""
    reader, writer = FORKS.Pipe(duplex=False)
    child = FORKS.Process(
        target=train_until_killed, args=(str(folder), keep_rows, retain.value, fault, writer)
    )
    child.start()
    writer.close()
    events: list[tuple[str, Any]] = []
    kill_expected, end = kill_after is not None, time.monotonic() + (60 if kill_after is None else kill_after)
    while True:
        try:
            if not reader.poll(max(0.0, end - time.monotonic())):
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
                assert kill_expected, f"the trainer hangs after {events[-3:]}"
                end += 60
            events.append(reader.recv())
        except EOFError:
            break
    child.join(30)
    assert child.exitcode is not None
    return events, child.exitcode


def check_nothing_acknowledged_is_lost(folder: Path, events: list[tuple[str, Any]]) -> None:
    if not (folder / "dataplane" / "journal.sqlite").exists():
        assert not events
        return
    report = audit(folder)
    assert report.balanced, str(report)
    trained = {key for _, key in Ledger.read(folder).trained_keys("train")}
    acked = {key for what, step in events if what == "acked" for key in keys_of(step) if not is_poison(key)}
    assert acked <= trained

    async def look() -> None:
        plane = EmbeddedDataPlane.open(folder / "dataplane", **BOUNDS)
        rows = await plane.list("train")
        for what, key in events:
            for kind, made in (("rolled out", rollout_of), ("scored", score_of)):
                if what == kind and key not in trained:
                    columns = await plane.get(BatchMeta("train", (key,)), tuple(made(key)))
                    for name, cell in made(key).items():
                        found = columns[name][0] if name == "reward" else columns[name][0].numpy()
                        assert found == cell if name == "reward" else found.tobytes() == cell.tobytes()
        assert trained.isdisjoint(rows)
        await plane.close()

    asyncio.run(look())


def check_the_finished_run(folder: Path) -> None:
    expected = [key for step in range(1, STEPS + 1) for key in keys_of(step) if not is_poison(key)]
    assert load_checkpoint(folder)["weights"] == expected, "every row is trained once, in order"
    report = audit(folder)
    poison = [key for step in range(1, STEPS + 1) for key in keys_of(step) if is_poison(key)]
    assert (
        report.balanced
        and report.trained == len(expected)
        and report.dead == len(poison)
        and report.in_flight == 0
    )
    letters = [
        json.loads(line)["key"]
        for line in (folder / "dataplane" / "dead_letters.jsonl").read_text().splitlines()
    ]
    assert sorted(letters) == poison
    assert not list((folder / "dataplane" / "spill").iterdir()), "files of settled columns are deleted"


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("keep_rows", [False, True])
def test_a_trainer_killed_twice_at_a_named_point_loses_nothing_and_trains_each_row_once(
    tmp_path: Path, point: str, keep_rows: bool
) -> None:
    kills = 0
    for passage in (1, 3):
        events, code = run_child(tmp_path, keep_rows, Retain.UNTIL_SETTLED, f"{point}:{passage}")
        kills += code == -signal.SIGKILL
        check_nothing_acknowledged_is_lost(tmp_path, events)
    assert kills, f"{point} was never passed: this test proves nothing"
    assert run_child(tmp_path, keep_rows, Retain.UNTIL_SETTLED)[1] == 0
    check_the_finished_run(tmp_path)


def check_one_random_trial(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    keep_rows, retain = rng.random() < 0.7, rng.choice(list(Retain))
    for _ in range(rng.randint(1, 4)):
        events, code = run_child(folder, keep_rows, retain, kill_after=rng.uniform(0.0, 0.6))
        check_nothing_acknowledged_is_lost(folder, events)
        if code == 0:
            break
    events, code = run_child(folder, keep_rows, retain)
    assert code == 0, f"seed {seed}"
    check_the_finished_run(folder)


@pytest.mark.parametrize("seed", range(8))
def test_a_trainer_killed_at_random_moments_loses_nothing_and_trains_each_row_once(
    tmp_path: Path, seed: int
) -> None:
    check_one_random_trial(tmp_path, seed)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_a_trainer_killed_at_random_moments_in_300_trials_loses_nothing(tmp_path: Path, seed: int) -> None:
    check_one_random_trial(tmp_path, seed)
