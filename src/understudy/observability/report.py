"""The report of a run: curves, a table, a few rollouts before and after. Reads only the run directory.

The page is one file: pictures are embedded as data, and its content policy forbids loading anything.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy.observability.advisories.gather import advisories_of
from understudy.observability.advisories.history import History
from understudy.observability.metrics import read_metrics
from understudy.observability.rundir import RunDir, read_json

_ROLLOUTS_PER_SOURCE = 3


def write_report(run: RunDir, next_command: str | None = None) -> Path:
    """Draw curves.png and timeline.png and write report.html, which holds both; returns the page's path."""
    # Matplotlib takes half a second to import, and every process of a run imports this file; few of them
    # draw.
    from understudy.observability.curves import draw_curves  # noqa: PLC0415
    from understudy.observability.timeline import draw_timeline  # noqa: PLC0415

    metrics = read_metrics(run.metrics)
    draw_curves(metrics, run.path / "curves.png")
    timeline = draw_timeline(run.spans, run.path / "timeline.png")
    page = run.path / "report.html"
    page.write_text(_page(run, metrics, next_command, timeline))
    return page


def note_of(run: RunDir) -> str:
    """The recipe's sentence for readers (`run.note`), or nothing."""
    recipe = read_json(run.recipe) if run.recipe.exists() else {}
    return (recipe.get("run") or {}).get("note") or ""


def teachers_measured(table: Sequence[dict[str, Any]]) -> bool:
    return any(entry["teacher"] is not None for entry in table)


def accuracy_table(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per data source: the student before and after, the teacher, and the ratio of the two. A run
    that ended before its second evaluation has no figure for "after"."""
    evaluated = [line for line in metrics if any(key.startswith("val/accuracy/") for key in line)]
    if not evaluated:
        return []
    first, last = evaluated[0], evaluated[-1]
    table = []
    for key in sorted(key for key in last if key.startswith("val/accuracy/")):
        source = key.removeprefix("val/accuracy/")
        before = first.get(key) if first is not last or first["step"] == 0 else None
        after = last[key] if last["step"] > 0 else None
        teacher = first.get(f"val/teacher_accuracy/{source}")
        ratio = after / teacher if teacher and after is not None else None
        table.append(
            {"source": source, "before": before, "after": after, "teacher": teacher, "of_teacher": ratio}
        )
    return table


def _page(run: RunDir, metrics: Sequence[dict[str, Any]], next_command: str | None, timeline: bool) -> str:
    state = read_json(run.state) if run.state.exists() else {}
    last = metrics[-1] if metrics else {}
    seconds = sum(line.get("time/step", 0.0) or 0.0 for line in metrics)
    facts = [
        ("steps", last.get("step", 0)),
        ("objective", state.get("objective", "")),
        ("training time", f"{seconds:.0f} s"),
        ("rows trained", state.get("rows_trained", "")),
        ("rows dead-lettered", state.get("dead_letters", 0)),
    ]
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in facts
    )
    drawn = _picture(run.path / "timeline.png", "What the trainer did when, and what was under way beside it")
    gantt = f"<h2>The last steps</h2>{drawn}" if timeline else ""
    note = note_of(run)
    caption = f'<p class="note">{html.escape(note)}</p>' if note else ""
    command = f"<h2>Next</h2><pre>{html.escape(next_command)}</pre>" if next_command else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(run.path.name)}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }} th, td {{ padding: .25rem .9rem; border-bottom: 1px solid #ddd; text-align: left }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }} pre {{ background: #f5f5f2; padding: .8rem; overflow-x: auto }}
img {{ max-width: 100% }} .right {{ color: #2e7d32 }} .wrong {{ color: #b00020 }} .note, .warning {{ background: #fff8e1; padding: .5rem .8rem }} code {{ white-space: pre-wrap }}
</style></head><body>
<h1>{html.escape(run.path.name)}</h1>
{_advisories_html(run, metrics)}
{_picture(run.path / "curves.png", "Curves of loss, KL and held-out accuracy over the steps")}
<h2>Held-out accuracy</h2>{_accuracy_html(accuracy_table(metrics))}
<h2>Rollouts before and after</h2>{caption}{_samples_html(run)}
<h2>The run</h2><table>{rows}</table>{gantt}{command}
</body></html>
"""


def _advisories_html(run: RunDir, metrics: Sequence[dict[str, Any]]) -> str:
    found = advisories_of(run, History(metrics))
    items = "".join(f'<li class="{one.level}">{html.escape(str(one))}</li>' for one in found)
    return f"<h2>Advisories</h2><ul>{items}</ul>" if items else ""


def _accuracy_html(table: Sequence[dict[str, Any]]) -> str:
    if not table:
        return "<p>Nothing was evaluated: set <code>data.eval</code> and <code>data.reward</code>.</p>"
    measured = teachers_measured(table)
    columns = {"before": "student before", "after": "student after"}
    columns |= {"teacher": "teacher", "of_teacher": "after / teacher"} if measured else {}
    head = "".join(f"<th>{title}</th>" for title in ("data source", *columns.values()))
    body = ""
    for entry in table:
        cells = "".join(f'<td class="number">{_percent(entry[key])}</td>' for key in columns)
        body += f"<tr><td>{html.escape(entry['source'])}</td>{cells}</tr>"
    missing = (
        ""
        if measured
        else "<p>Teachers were not measured: <code>trainer.eval_teachers = true</code> does that.</p>"
    )
    return f"<table><tr>{head}</tr>{body}</table>{missing}"


def _picture(path: Path, alt: str) -> str:
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}">'


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _samples_html(run: RunDir) -> str:
    texts = run.samples.read_text().splitlines() if run.samples.exists() else []
    lines = [line for line in map(json.loads, texts) if line.get("model", "student") == "student"]
    if not lines:
        return "<p>No rollouts were kept.</p>"
    steps = sorted({line["step"] for line in lines})
    before = {line["key"]: line for line in lines if line["step"] == steps[0]}
    after = [line for line in lines if line["step"] == steps[-1]]
    head = "<tr><th>data source</th><th>prompt</th><th>before</th><th>after</th><th>answer</th></tr>"
    body, shown = "", dict.fromkeys({line["source"] for line in after}, 0)
    for line in after:
        if shown[line["source"]] >= _ROLLOUTS_PER_SOURCE:
            continue
        shown[line["source"]] += 1
        cells = [
            _plain(line["source"]),
            _plain(line["prompt"]),
            _judged(before.get(line["key"])),
            _judged(line),
            _plain(line.get("answer")),
        ]
        body += f"<tr>{''.join(cells)}</tr>"
    return f"<table>{head}{body}</table>"


def _plain(text: Any) -> str:
    return f"<td><code>{html.escape('' if text is None else str(text))}</code></td>"


def _judged(line: dict[str, Any] | None) -> str:
    if line is None:
        return "<td></td>"
    kind = "right" if (line.get("reward") or 0) > 0 else "wrong"
    return f'<td class="{kind}"><code>{html.escape(str(line["text"]))}</code></td>'
