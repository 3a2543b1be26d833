"""The Gantt chart reads what one process wrote last, and draws it."""

import json
from pathlib import Path

from understudy.observability.spans import Spans
from understudy.observability.timeline import draw_timeline, last_steps, read_last_launch


def span(name: str, start: float, end: float) -> dict[str, object]:
    return {"name": name, "start": start, "end": end}


def test_an_earlier_launch_and_a_torn_line_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    old, new = [span("update", 0, 50), span("publish", 50, 60)], [span("rollout", 0, 1), span("update", 1, 2)]
    path.write_text("\n".join(map(json.dumps, [*old, *new])) + '\n{"name": "upd')
    assert read_last_launch(path) == new


def test_only_the_last_steps_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    spans = [span(name, i, i + 0.5) for i in range(10) for name in ("rollout", "score", "update")]
    assert {s["start"] for s in last_steps(spans, 3)} == {7, 8, 9}
    path.write_text("\n".join(map(json.dumps, spans)))
    assert draw_timeline(path, tmp_path / "timeline.png", steps=3)
    assert (tmp_path / "timeline.png").stat().st_size > 5000


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    assert not draw_timeline(tmp_path / "none.jsonl", tmp_path / "timeline.png")


def test_whoever_ends_after_the_file_was_closed_is_not_troubled(tmp_path: Path) -> None:
    spans = Spans(tmp_path / "spans.jsonl")
    with spans.span("update"):
        pass
    with spans.span("rollout"):
        spans.close()
    assert [entry["name"] for entry in read_last_launch(tmp_path / "spans.jsonl")] == ["update"]
    assert not spans.under_way()
