"""The watchdog lists what a run waits for and notes a stall."""

import asyncio
import json
from pathlib import Path

from understudy.observability.spans import Spans
from understudy.observability.watchdog import read_waits, waiting_for, watched


def test_waits_are_grouped_by_span_name_and_show_the_oldest_span() -> None:
    spans = Spans(None)
    with (
        spans.span("score", key="a", teacher="math"),
        spans.span("rollout", key="b"),
        spans.span("rollout", key="c"),
    ):
        now = spans.under_way()[0].start + 30
        first, second = waiting_for(spans.under_way(), now)
        assert str(first) == "score (key a, teacher math), 30 s"
        assert str(second).startswith("2 × rollout (oldest: key b), 30 s")
    assert spans.under_way() == []


def test_the_watchdog_notes_a_stall_and_names_the_spans_under_way(tmp_path: Path) -> None:
    notes: list[str] = []
    spans, path = Spans(None), tmp_path / "waits.json"

    async def stalled() -> None:
        async with watched(spans, path, 0.05, notes.append, lambda: {"rows trained": 3}):
            with spans.span("wait for rows", step=7):
                while not notes:
                    await asyncio.sleep(0.01)
                entry, waits = read_waits(path)
                assert entry["status"] == "running" and entry["facts"] == {"rows trained": 3}
                assert [wait.name for wait in waits] == ["wait for rows"]

    asyncio.run(asyncio.wait_for(stalled(), 20))
    assert "wait for rows (step 7)" in notes[0]
    assert json.loads(path.read_text())["status"] == "ended"


def test_the_watchdog_notes_no_stall_while_spans_begin_and_end(tmp_path: Path) -> None:
    notes: list[str] = []
    spans = Spans(None)

    async def moving() -> None:
        async with watched(spans, tmp_path / "waits.json", 30.0, notes.append, dict):
            for _ in range(20):
                with spans.span("rollout"):
                    await asyncio.sleep(0.005)

    asyncio.run(moving())
    assert not notes


def test_waits_json_says_ended_even_when_a_write_is_in_progress_at_the_end(tmp_path: Path) -> None:
    """The watchdog thread may be writing the file at the moment the body ends. 300 trials vary that moment."""
    path = tmp_path / "waits.json"

    async def once(seconds: float) -> None:
        async with watched(Spans(None), path, 0.0005, lambda text: None, dict):
            await asyncio.sleep(seconds)

    for turn in range(300):
        asyncio.run(once(turn % 30 * 1e-4))
        assert json.loads(path.read_text())["status"] == "ended"
    assert [one.name for one in tmp_path.iterdir()] == ["waits.json"]
