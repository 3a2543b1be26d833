"""Bugs planted in a copy of the package: the nemesis finds each within `SEEDS` seeds. `simulation/` has more.

A bug of `NEED_ONE_KIND` shows only under one kind of fault. Its seeds draw faults of that kind alone: one or two, or
three to six for the kinds in `SHORT_FAULTS`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import PACKAGE, Bug, planted_files, seeds_until_found, single_edit
from schedules import NETWORK

SEEDS = 8
SHORT_FAULTS = (
    *NETWORK,
    "corrupt",
    "clock",
    "full journal",
    "freeze trainer",
    "freeze replica",
    "failing fsync",
)
"""Kinds of faults of which a seed draws three to six, because most of them are too short or come too late."""
CAMPAIGN = Path(__file__).with_name("campaign.py")
BUGS = {
    "a rewind leaves rows marked as trained": single_edit(
        "sync full", "dataplane/journal/rewind.py", 'connection.execute(_UNTRAIN, {"step": step})', "pass",
    ),
    "a rewind leaves the events of forgotten rows": single_edit(
        "sync full", "dataplane/journal/rewind.py", "connection.execute(_FORGET_EVENTS)", "pass",
    ),
    "a resume keeps metrics of steps that it makes again": single_edit(
        "sync full", "trainers/checkpoints.py", "cut_back(run.metrics, step)", "pass",
    ),
    "a resume begins the data again": single_edit(
        "sync full", "trainers/checkpoints.py",
        'system.producer.cursor.restore(checkpoint.extra["cursor"])', "pass",
    ),
    "a resume begins with an empty optimizer": single_edit(
        "sync full", "policy/student_weights.py", "self._optimizer.load_state(own)", "pass",
    ),
    "seeds of samples depend on the process": single_edit(
        "sync full", "trainers/produce/session.py", "derive_seed(producer.settings.seed,",
        "derive_seed(producer.settings.seed + __import__('os').getpid(),",
    ),
    "dead letters are in the journal alone": single_edit(
        "several outputs", "dataplane/dead_letters.py",
        "out.writelines(self._unwritten)", "pass",
    ),
    "processes outlive their trainer": single_edit(
        "engine process", "serving/process.py", "end_with_launcher(args.watch_fd, before_orphaned_exit)", "pass",
    ),
}  # fmt: skip

EXTERNAL, POOL = "external teacher", "teacher/pool/pool.py"
CHECKPOINT, LOCAL = "policy/checkpoints/checkpoint.py", "cluster/local.py"
RANKS, MONITOR = "policy/ranks/follow.py", "serving/supervisor.py"
LATE = (
    (POOL, "return growth * (self.options.deadline_base + work)", "return 1.0"),
    (POOL, "return Failure.TIMEOUT if", "return Failure.SERVER if"),
)
NEED_ONE_KIND = {
    "a damaged body is taken": single_edit(
        "proxy between processes", "serving/checksum.py",
        "return expected is not None and expected != checksum(body)", "return False", "damage",
    ),
    "a broken connection fails its request": single_edit(
        EXTERNAL, POOL, "if final and attempts.bad >= self.options.max_bad_attempts:",
        "if failure is Failure.CONNECTION or attempts.bad >= self.options.max_bad_attempts:", "reset",
    ),
    "a request waits for a second, and fails if it is late": Bug(EXTERNAL, LATE, "partition"),
    "a request waits for a second, and fails if the network is slow": Bug(EXTERNAL, LATE, "delay"),
    "a request to a replica that is frozen beyond its deadline fails": single_edit(
        "sync full", POOL, "if final and attempts.bad >= self.options.max_bad_attempts:",
        "if failure is Failure.TIMEOUT or attempts.bad >= self.options.max_bad_attempts:", "freeze replica",
    ),
    "sessions of a lost worker are not run again": single_edit(
        "rollout workers", "rollout/workers/pool.py", "for _ in range(_TRIES):", "for _ in range(1):", "kill worker",
    ),
    "an engine process is started again with its first weights": single_edit(
        "engine process", "engines/hosted/engine.py", "await self._delivery.give(self._version, fresh)", "pass", "kill engine",
    ),
    "a lost critic ends the launch": single_edit("critic", "run/restarts.py", "and used < allowed and", "and False and", "kill critic"),
    "a killed replica leaves its pictures": single_edit(
        "pictures", "teacher/replica/media.py", "OwnedFolder(REPLICA_FOLDER, None)", 'OwnedFolder("understudy-seen-", None, tidy=False)', "kill replica",
    ),
    "a checkpoint is loaded although its digest differs": single_edit(
        "sync full", CHECKPOINT, 'if sha256_of(file) != expected["sha256"]:', "if False:", "corrupt",
    ),
    "the start of a process is timed by the wall clock": Bug(
        "sync full",
        (
            (LOCAL, "deadline = time.monotonic() + self._start_timeout\n        while not ready_file", "deadline = time.time() + self._start_timeout\n        while not ready_file"),
            (LOCAL, "if time.monotonic() > deadline:\n                raise ClusterError(", "if time.time() > deadline:\n                raise ClusterError("),
        ),
        "clock",
    ),
    "rows that find no room in the journal are taken as written": single_edit(
        "sync full", "dataplane/journal/writer.py",
        'self.failure = self.failed("written", error)\n            raise self.failure from error', "return", "full journal",
    ),
    "a step that cannot be flushed is passed over": Bug(
        "sync full",
        (
            ("trainers/checkpoints.py", "except OSError as error:\n            raise CheckpointError(", "except OSError as error:\n            return\n            raise CheckpointError("),
            (CHECKPOINT, "self.recover()\n            raise CheckpointError(", "self.recover()\n            return final\n            raise CheckpointError("),
        ),
        "failing fsync",
    ),
    "a flush has half a second": single_edit(
        "sync full", "dataplane/embedded.py", "await self._store.journal.run(lambda connection: writer.flush())",
        "await __import__('asyncio').wait_for(self._store.journal.run(lambda connection: writer.flush()), 0.5)", "slow fsync",
    ),
    "half a line of metrics ends a resume": single_edit(
        "sync full", "observability/metrics.py", "except json.JSONDecodeError:\n            continue", "except json.JSONDecodeError:\n            raise", "tear",
    ),
    "the file of dead letters is not written anew": single_edit(
        "several outputs", "dataplane/dead_letters.py", "fresh.replace(self._file)", "fresh.unlink()", "tear",
    ),
    "a lost rank is not noticed (its three checks taken out)": Bug(
        "ranks",
        (
            (MONITOR, "if not one.process.alive]", "if False]"),
            (MONITOR, "self._loss = self._silent()", "self._loss = None"),
            (RANKS, "if cause is None and broke and", "if False and"),
        ),
        "kill rank",
    ),
    "a dead fork server is waited for": single_edit(
        "epochs", LOCAL, "if found.over or time.monotonic() > deadline:", "if time.monotonic() > deadline:", "kill fork server",
    ),
    "a request that is older than a minute is given up on, and the trainer was frozen for longer": Bug(
        "sync full",
        (
            (POOL, "        attempts = _Attempts()\n", "        attempts, begun = _Attempts(), self._clock.now()\n"),
            (POOL, "self._failed(one.replica, tokens, attempts, one.error, final=scores is None)\n",
             "self._failed(one.replica, tokens, attempts, one.error, final=scores is None)\n"
             "                        if self._clock.now() - begun > 60:\n"
             "                            raise one.error\n"),
        ),
        "freeze waiting",
    ),
    "a process whose machine is lost counts as alive": single_edit(
        "ray workers", "cluster/ray.py", "process.returncode = _LOST", "return", "lost machine",
    ),
    "a lost machine of the run's own Ray is waited for": single_edit(
        "ray queue", "cluster/ray_cluster.py", "if kind in _NODE_PROCESSES:", "if False:", "kill node",
    ),
    "a worker waits for a generation for three seconds, and gives up if the trainer is frozen": single_edit(
        "rollout workers", "rollout/workers/process.py", "generation = await answer", "generation = await asyncio.wait_for(answer, 3)", "freeze trainer",
    ),
    "a lost storage unit of the queue is not noticed": single_edit(
        "ray queue", "dataplane/transfer_queue/uploads.py", 'self.give_up(f"{type(error).__name__}: {error}")', "raise error", "kill queue",
    ),
    "a lack of memory is told as unexpected": single_edit(
        "sync full", "errors.py", "return isinstance(error, MemoryError) or any(", "return False and any(", "no memory trainer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*BUGS, *NEED_ONE_KIND])
def test_every_bug_can_be_planted(name: str) -> None:
    files = planted_files({**BUGS, **NEED_ONE_KIND}[name])
    assert files
    for file, text in files.items():
        compile(text, file, "exec")
        assert text != (PACKAGE / file).read_text()


@pytest.mark.faults
@pytest.mark.parametrize("name", [*BUGS, *NEED_ONE_KIND])
def test_the_nemesis_finds_a_planted_bug(name: str, tmp_path: Path) -> None:
    bug, out = {**BUGS, **NEED_ONE_KIND}[name], str(tmp_path / "out.jsonl")
    if bug.finder.startswith("ray"):
        pytest.importorskip("ray")
    arguments = [
        str(CAMPAIGN), "--mode", bug.finder, "--seeds", f"0:{SEEDS}", "--only", bug.only, "--out", out, "--first", "--shrink", "0",
        "--most", "6" if not bug.only or bug.only in SHORT_FAULTS else "2",
    ]  # fmt: skip
    seeds = seeds_until_found(arguments, bug, tmp_path)
    assert 1 <= seeds <= SEEDS
    print(f"{name}: {seeds} seeds")
