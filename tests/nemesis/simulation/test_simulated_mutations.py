"""Bugs planted in the simulated parts of the package: the simulation finds each within `STEPS` steps, in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import PACKAGE, Bug, planted_files, seeds_until_found, single_edit

SIMULATE = Path(__file__).with_name("simulate.py")
STEPS = {"run": 20_000, "pool": 20_000, "health": 10_000, "slots": 10_000}
STORE, POOL = "dataplane/memory/store.py", "teacher/pool/pool.py"
HEALTH = "teacher/pool/health.py"
WALL_CLOCK = "__import__('understudy.teacher.pool.clock', fromlist=['time']).time.time()"
"""The clock of the time of day, which the simulation changes."""
BUGS = {
    "a row is acknowledged before it is written": single_edit(
        "run", "dataplane/memory/intake.py",
        "        self._write(part, frames, given, status, room)\n        await store.journal.durable()\n",
        "        self._write(part, frames, given, status, room)\n        store.journal.durable()\n",
    ),
    "a lease that ends is never returned": single_edit(
        "run", STORE, "            for row in list(held.rows.values()):\n                self.give_back(row)\n", "            pass\n",
    ),
    "the flush of the journal is lost": single_edit("run", "dataplane/journal/writer.py", "os.fsync(handle)", "pass"),
    "the wrong row is buried": single_edit(
        "run", "dataplane/embedded.py",
        "        row = self._store.row(part, key)\n        group = row.group\n",
        "        row = part.rows[min(part.rows)]\n        group = row.group\n",
    ),
    "a settled key is issued again": single_edit(
        "run", "dataplane/memory/intake.py", " and key not in part.settled]", "]",
    ),
    "a rewind leaves rows marked as trained in the ledger": single_edit(
        "run", "dataplane/journal/rewind.py", 'connection.execute(_UNTRAIN, {"step": step})', "pass",
    ),
    "a rewind does not bring rows back": single_edit(
        "run", "dataplane/journal/rewind.py", 'connection.execute(_REVIVE, {"step": step})', "pass",
    ),
    "a rewind leaves the events of forgotten rows": single_edit(
        "run", "dataplane/journal/rewind.py", "connection.execute(_FORGET_EVENTS)", "pass",
    ),
    "a checkpoint holds the place of the newest prompt": single_edit(
        "run", "trainers/pacing/window_cursor.py",
        "return self._starts.get(self._trained) or self._place()", "return self._place()",
    ),
    "a dead letter is in the journal alone": single_edit(
        "run", "dataplane/dead_letters.py", "out.writelines(self._unwritten)", "pass",
    ),
    "a publish waits for no row": single_edit(
        "pool", "trainers/pacing/publish_gate.py", "        await self._empty.wait()\n", "        pass\n",
    ),
    "a reply is off by one row": single_edit(
        "pool", POOL, "[one.by(replica.name) for one in scores]", "[one.by(replica.name) for one in [*scores[1:], *scores[:1]]]",
    ),
    "a teacher with older weights is accepted": Bug(
        "pool",
        (
            (POOL, "            if one.version != version:\n", "            if False:\n"),
            (
                "teacher/pool/supervisor.py",
                "if found.manifest.version != self.version:\n            raise",
                "if False:\n            raise",
            ),
            ("teacher/pool/integrity.py", "        if ours != theirs:\n", "        if False:\n"),
            (
                "teacher/pool/integrity.py",
                "float(np.abs(expected.probe_logprobs - found.probe_logprobs).max())",
                "0.0",
            ),
            ("teacher/pool/canary.py", "        if wrong_P.any():\n", "        if False:\n"),
        ),
    ),
    "shifted scores are accepted": single_edit("pool", "teacher/pool/canary.py", "        if wrong_P.any():\n", "        if False:\n"),
    "an ejected replica is asked": Bug(
        "pool",
        (
            ("teacher/pool/supervisor.py", "for replica in awake if replica.health.state is State.SUSPECT]",
             "for replica in awake if replica.client is not None]"),
            ("teacher/pool/pool.py", "if not replica.health.usable:", "if False:"),
        ),
    ),
    "a replica comes back without its probe": single_edit(
        "pool", "teacher/pool/supervisor.py",
        "        replica.health.started()\n        try:\n            await self._probe(replica)\n",
        "        replica.health.started()\n        try:\n            pass\n",
    ),
    "the load of a request is never taken off": single_edit(
        "pool", POOL, "            replica.load.end(tokens)\n", "            pass\n",
    ),
    "a request waits for a replica that never changes": single_edit(
        "pool", POOL, "        attempts.tried.clear()\n", "        pass\n",
    ),
    "a second deadline around each request fails it, if the trainer was frozen": single_edit(
        "pool", POOL, "                scores = await self._checked(replica, items, self._deadline(replica, attempts))\n",
        "                async with asyncio.timeout(1.5 * self._deadline(replica, attempts)):\n"
        "                    scores = await self._checked(replica, items, self._deadline(replica, attempts))\n",
    ),
    "backoffs of replicas are timed by the wall clock": Bug(
        "pool",
        (
            (HEALTH, "State.EJECTED and now >= self.retry_at", f"State.EJECTED and {WALL_CLOCK} >= self.retry_at"),
            (HEALTH, "self.retry_at = now + (", f"self.retry_at = {WALL_CLOCK} + ("),
        ),
    ),
    "a request is sent to a replica that was ejected while the request waited": single_edit(
        "pool", POOL, "if not replica.health.usable:", "if False:",
    ),
    "backoffs do not grow": single_edit(
        "health", "teacher/pool/health.py", "self.rules.restarts.wait_before(self.setbacks)", "self.rules.restarts.wait_before(1)",
    ),
    "a success excuses bad replies": single_edit(
        "health", "teacher/pool/health.py",
        "        self.streak = 0\n        self.state = State.HEALTHY\n",
        "        self.streak = self.bad_replies = 0\n        self.state = State.HEALTHY\n",
    ),
    "one window too many is admitted": single_edit(
        "slots", "planning/windows.py",
        "min(published * self.size + slots, self.prompts)", "min((published + 1) * self.size + slots, self.prompts)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_every_simulated_bug_can_be_planted(name: str) -> None:
    files = planted_files(BUGS[name])
    assert files
    for file, text in files.items():
        compile(text, file, "exec")
        assert text != (PACKAGE / file).read_text()


@pytest.mark.faults
@pytest.mark.parametrize("name", BUGS)
def test_the_simulation_finds_a_planted_bug(name: str, tmp_path: Path) -> None:
    bug = BUGS[name]
    arguments = [str(SIMULATE), "--part", bug.finder, "--steps", str(STEPS[bug.finder])]
    seeds = seeds_until_found(arguments, bug, tmp_path)
    assert seeds >= 1
    print(f"{name}: {seeds} seeds")
