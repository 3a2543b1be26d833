"""A replica's counters in Prometheus' text format."""

from __future__ import annotations

from understudy.teacher.replica.scoring_queue import WorkerCounts

_SERIES = (
    ("requests", "counter", "requests_total", "score requests answered"),
    ("sequences", "counter", "sequences_total", "sequences scored"),
    ("tokens", "counter", "tokens_total", "tokens prefilled"),
    ("positions", "counter", "positions_total", "positions scored"),
    ("batches", "counter", "batches_total", "times the model was busy with one or more requests"),
    ("failures", "counter", "failures_total", "requests whose scoring raised"),
    ("busy_seconds", "counter", "busy_seconds_total", "seconds spent scoring"),
    ("waiting_requests", "gauge", "waiting_requests", "requests not answered yet"),
    ("waiting_tokens", "gauge", "waiting_tokens", "tokens of requests not answered yet"),
)


def replica_metrics(counts: WorkerCounts, teacher: str) -> str:
    label = teacher.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    with counts.lock:
        for field, kind, name, meaning in _SERIES:
            series = f"understudy_teacher_{name}"
            lines.append(f"# HELP {series} {meaning}")
            lines.append(f"# TYPE {series} {kind}")
            lines.append(f'{series}{{teacher="{label}"}} {getattr(counts, field)}')
    return "\n".join(lines) + "\n"
