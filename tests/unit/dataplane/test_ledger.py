"""The audit of a journal: every kind of broken accounting is planted and must be named, so the audit can fail."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.cli.main import main
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.dataplane.ledger import Ledger, audit
from understudy.errors import DataPlaneError

BOUNDS: dict[str, Any] = {"max_rows": 100, "max_bytes": 2**20, "spill_bytes": 2**20}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """3 rows trained, 1 dead, 1 evicted, 2 in flight."""

    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path / "dataplane", **BOUNDS)
        keys = [f"{i}_0_0" for i in range(7)]
        await plane.issue("train", keys, step=1)
        await plane.put("train", {key: {"x": np.zeros(1, np.int32)} for key in keys[:6]})
        lease = await plane.claim("train", 3)
        await plane.ack(lease, 1, keys[:2])
        await plane.ack(lease, 2)
        await plane.dead_letter("train", keys[3], "poison")
        await plane.evict("train", [keys[4]], "stale")
        await plane.close()

    asyncio.run(body())
    return tmp_path


def plant(run_dir: Path, *statements: str) -> None:
    connection = sqlite3.connect(run_dir / "dataplane" / "journal.sqlite")
    for statement in statements:
        assert connection.execute(statement).rowcount != 0
    connection.commit()
    connection.close()


EVENT = "INSERT INTO events(kind, sign, partition, step, keys) VALUES "
PLANTS: dict[str, tuple[str, Callable[[Any], list[str]], str]] = {
    "trained twice": (
        EVENT + "('trained', 1, 'train', 2, '[\"0_0_0\"]')",
        lambda report: report.twice,
        "train/0_0_0",
    ),
    "trained and dead": (
        EVENT + "('trained', 1, 'train', 2, '[\"3_0_0\"]')",
        lambda report: report.twice,
        "train/3_0_0",
    ),
    "trained and in flight": (
        EVENT + "('trained', 1, 'train', 2, '[\"5_0_0\"]')",
        lambda report: report.twice,
        "train/5_0_0",
    ),
    "issued twice": (
        EVENT + "('issued', 1, 'train', 1, '[\"6_0_0\"]')",
        lambda report: report.twice,
        "train/6_0_0",
    ),
    "row gone": ("DELETE FROM rows WHERE key = '6_0_0'", lambda report: report.lost, "train/6_0_0"),
    "ack gone": (
        "UPDATE events SET keys = '[\"0_0_0\"]' WHERE kind = 'trained' AND step = 1",
        lambda report: report.lost,
        "train/1_0_0",
    ),
    "dead letter gone": ("DELETE FROM events WHERE kind = 'dead'", lambda report: report.lost, "train/3_0_0"),
    "never issued, trained": (
        EVENT + "('trained', 1, 'train', 2, '[\"ghost\"]')",
        lambda report: report.unknown,
        "train/ghost",
    ),
    "never issued, in flight": (
        "INSERT INTO rows VALUES (99, 'train', 'ghost', NULL, NULL, 'pending', 1, 0, 0, '{}', NULL)",
        lambda report: report.unknown,
        "train/ghost",
    ),
    "ack back in flight": (
        "UPDATE rows SET trained = NULL WHERE key = '0_0_0'",
        lambda report: report.twice,
        "train/0_0_0",
    ),
}


def test_the_audit_of_a_correct_run_is_balanced(run_dir: Path) -> None:
    for path in (run_dir, run_dir / "dataplane", run_dir / "dataplane" / "journal.sqlite"):
        report = audit(path)
        assert report.balanced
        assert (report.issued, report.trained, report.dead, report.evicted, report.in_flight) == (
            7,
            3,
            1,
            1,
            2,
        )
    assert report.per_step == {1: 2, 2: 1} and report.reasons == {"poison": 1, "stale": 1}
    assert str(report) == "issued 7 = trained 3 + dead-lettered 1 + evicted 1 + in flight 2: balanced"
    assert list(Ledger.read(run_dir).trained_keys("train")) == [(1, "0_0_0"), (1, "1_0_0"), (2, "2_0_0")]


@pytest.mark.parametrize("name", PLANTS)
def test_the_audit_names_the_row_whose_accounting_is_broken(run_dir: Path, name: str) -> None:
    statement, where, key = PLANTS[name]
    plant(run_dir, statement)
    report = audit(run_dir)
    assert not report.balanced and where(report) == [key], str(report)
    assert "NOT BALANCED" in str(report) and key in str(report)


def test_the_audit_reads_running_and_dead_runs_without_changing_their_files(tmp_path: Path) -> None:
    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path / "dataplane", **BOUNDS)
        for i in range(20):
            await plane.put("train", {f"{i}_0_0": {"x": i}})
            if i == 9:
                assert audit(tmp_path).in_flight == 10
        before = {path.name: path.read_bytes() for path in (tmp_path / "dataplane").glob("journal.sqlite*")}
        # A dead run leaves a journal that was not closed; copies of an open journal are the same.
        dead = tmp_path / "dead"
        dead.mkdir()
        for name in ("journal.sqlite", "journal.sqlite-wal"):
            (dead / name).write_bytes(before[name])
        assert audit(dead).in_flight == 20
        assert (dead / "journal.sqlite").read_bytes() == before["journal.sqlite"]
        assert (dead / "journal.sqlite-wal").read_bytes() == before["journal.sqlite-wal"]
        await plane.close()

    asyncio.run(body())


def test_the_audit_groups_reasons_that_differ_only_in_the_row_and_shows_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path / "dataplane", **BOUNDS)
        for i in range(4):
            await plane.put("train", {f"{i}_0_0": {"x": i}})
            reason = f"RequestRefused: row '{i}_0_0' has 163 tokens" if i < 3 else "DataError: no prompt"
            await plane.dead_letter("train", f"{i}_0_0", reason)
        await plane.close()

    asyncio.run(body())
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    assert main(["audit", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "3 × RequestRefused: row '0_0_0' has 163 tokens (the first of 3 reasons)" in output
    assert "1 × DataError: no prompt\n" in output


def test_a_missing_or_damaged_journal_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataPlaneError, match="no journal"):
        audit(tmp_path)
    (tmp_path / "journal.sqlite").write_bytes(b"hello" * 1000)
    with pytest.raises(DataPlaneError, match="cannot be opened as a journal"):
        audit(tmp_path)
    with pytest.raises(DataPlaneError, match="journal"):
        EmbeddedDataPlane.open(tmp_path, **BOUNDS)


def test_a_journal_of_another_format_is_refused_by_the_audit_and_by_the_plane(run_dir: Path) -> None:
    plant(run_dir, "UPDATE meta SET value = 99 WHERE name = 'format'")
    with pytest.raises(DataPlaneError, match="format 99"):
        audit(run_dir)
    with pytest.raises(DataPlaneError, match="format 99"):
        EmbeddedDataPlane.open(run_dir / "dataplane", **BOUNDS)


def test_the_audit_does_not_import_torch(run_dir: Path) -> None:
    program = (
        "import sys, json, pathlib; from understudy.dataplane.ledger import audit; "
        "report = audit(pathlib.Path(sys.argv[1])); "
        "print(json.dumps([report.balanced, 'torch' in sys.modules, 'numpy' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run_dir)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)[:2] == [True, False]


def test_secrets_are_removed_from_the_reasons_of_dead_letters(tmp_path: Path) -> None:
    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path / "dataplane", **BOUNDS)
        await plane.issue("train", ["0_0_0"], step=1)
        await plane.dead_letter(
            "train", "0_0_0", "no answer from http://me:pw@h/?token=abc", {"trace": ["Bearer secret"]}
        )
        await plane.close()

    asyncio.run(body())
    written = (tmp_path / "dataplane" / "dead_letters.jsonl").read_text()
    assert "no answer from http://<redacted>@h/" in written
    assert not [one for one in ("pw", "abc", "secret") if one in written]


def test_escape_sequences_and_markup_in_a_reason_are_printed_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path / "dataplane", **BOUNDS)
        await plane.issue("train", ["0_0_0"], step=1)
        await plane.dead_letter("train", "0_0_0", "wrong \x1b[2J[/b]")
        await plane.close()

    asyncio.run(body())
    (tmp_path / "recipe.json").write_text("{}")
    assert main(["audit", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "\x1b[2J" not in output and "wrong \\x1b[2J[/b]" in output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("how", ["finished", "killed"])
def test_another_user_can_audit_a_run(run_dir: Path, how: str) -> None:
    """For example a colleague's folder, or one on a disk that is mounted read-only."""
    if how == "killed":
        code = (
            "import asyncio, os, sys; from pathlib import Path; from understudy.dataplane.embedded import EmbeddedDataPlane\n"
            "async def main():\n"
            f"    plane = EmbeddedDataPlane.open(Path(sys.argv[1]), **{BOUNDS!r})\n"
            "    await plane.issue('train', ['9_0_0'], step=3)\n"
            "    os._exit(9)\n"
            "asyncio.run(main())"
        )
        subprocess.run([sys.executable, "-c", code, str(run_dir / "dataplane")], check=False)
    for folder in (run_dir, *run_dir.parents):
        if folder.stat().st_mode & 0o77 == 0:
            folder.chmod(0o755)
    child_pid = os.fork()
    if child_pid == 0:
        try:
            os.setuid(65534)
            os._exit(0 if audit(run_dir).issued == (8 if how == "killed" else 7) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child_pid, 0)[1] == 0
