"""Bugs planted in a copy of the package: the nemesis finds each within `SEEDS` seeds. Those of pure parts are in `simulation/`.

A bug of `NEEDING` shows only under one kind of fault; its seeds draw one or two faults of that kind alone, up to six of the network.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Bug, one, seeds_until_found
from schedules import NETWORK

SEEDS = 8
CAMPAIGN = Path(__file__).with_name("campaign.py")
BUGS = {
    "a rewind leaves rows marked as trained": one(
        "sync full", "dataplane/journal/rewind.py", 'connection.execute(_UNTRAIN, {"step": step})', "pass",
    ),
    "a rewind leaves the events of forgotten rows": one(
        "sync full", "dataplane/journal/rewind.py", "connection.execute(_FORGET_EVENTS)", "pass",
    ),
    "a resume keeps metrics of steps that it makes again": one(
        "sync full", "trainers/checkpoints.py", "cut_back(run.metrics, step)", "pass",
    ),
    "a resume begins the data again": one(
        "sync full", "trainers/checkpoints.py",
        'system.producer.cursor.restore(checkpoint.extra["cursor"])', "pass",
    ),
    "a resume begins with an empty optimizer": one(
        "sync full", "policy/policy.py", "self.optimizer.load_state(optimizer)", "pass",
    ),
    "seeds of samples depend on the process": one(
        "sync full", "trainers/produce/session.py", "derive_seed(producer.settings.seed,",
        "derive_seed(producer.settings.seed + __import__('os').getpid(),",
    ),
    "dead letters are in the journal alone": one(
        "several outputs", "dataplane/dead_letters.py",
        "out.write(self._line(partition, key, step, told))", "pass",
    ),
    "processes outlive their trainer": one(
        "engine process", "serving/process.py", "end_with_launcher(args.watch_fd, before_orphaned_exit)", "pass",
    ),
}  # fmt: skip

EXTERNAL, POOL = "external teacher", "teacher/pool/pool.py"
NEEDING = {
    "a damaged body is taken": one(
        "proxy between processes", "serving/checksum.py",
        "return told is not None and told != checksum(body)", "return False", "damage",
    ),
    "a broken connection fails its request": one(
        EXTERNAL, POOL, "if attempts.bad >= self.options.max_bad_attempts:",
        "if failure is Failure.CONNECTION or attempts.bad >= self.options.max_bad_attempts:", "reset",
    ),
    "a request waits for a second, and fails if it is late": Bug(
        EXTERNAL,
        (
            (POOL, "return growth * (self.options.deadline_base + work)", "return 1.0"),
            (POOL, "return Failure.TIMEOUT if", "return Failure.SERVER if"),
        ),
        "partition",
    ),
    "a request to a replica that is frozen beyond its deadline fails": one(
        "sync full", POOL, "if attempts.bad >= self.options.max_bad_attempts:",
        "if failure is Failure.TIMEOUT or attempts.bad >= self.options.max_bad_attempts:", "freeze replica",
    ),
    "sessions of a lost worker are not run again": one(
        "rollout workers", "rollout/workers/pool.py", "for _ in range(_TRIES):", "for _ in range(1):", "kill worker",
    ),
    "an engine process is started again with its first weights": one(
        "engine process", "engines/hosted/engine.py", "await self._delivery.give(self._version, fresh)", "pass", "kill engine",
    ),
    "a lost critic ends the launch": one("critic", "run/restarts.py", "if used >= allowed or", "if True or", "kill critic"),
    "a killed replica leaves its pictures": one(
        "pictures", "teacher/replica/media.py", "OwnedFolder(REPLICA_FOLDER, None)", 'OwnedFolder("understudy-seen-", None, tidy=False)', "kill replica",
    ),
}  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize("name", [*BUGS, *NEEDING])
def test_the_nemesis_finds_a_planted_bug(name: str, tmp_path: Path) -> None:
    bug, out = {**BUGS, **NEEDING}[name], str(tmp_path / "out.jsonl")
    words = [
        str(CAMPAIGN), "--mode", bug.finder, "--seeds", f"0:{SEEDS}", "--only", bug.only, "--out", out, "--first", "--shrink", "0",
        "--most", "2" if bug.only and bug.only not in NETWORK else "6",
    ]  # fmt: skip
    seeds = seeds_until_found(words, bug, tmp_path)
    assert 1 <= seeds <= SEEDS
    print(f"{name}: {seeds} seeds")
