"""What loggers read from a run's files: kept rows as conversations, spans as OTLP spans.

The trainer writes the files whether a logger runs or not; a logger reads what is new after each step. How far it
came is kept in its folder, so a resumed run sends nothing twice.
"""

from __future__ import annotations

import hashlib
import importlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.observability.lines import GrowingFile, record

_FACTS = (
    "key", "source", "teacher", "reward", "advantage", "kl", "tokens", "turns", "stop_reason", "oldest", "newest", "why",
)  # fmt: skip
_MOST_SPANS = 500
"""Spans of one request to a collector."""


def kept_id(folder: Path, make: Callable[[], str]) -> str:
    """This run's id with a logger, made once."""
    place = folder / "run_id"
    if not place.exists():
        place.write_text(make())
    return place.read_text()


@dataclass(frozen=True, slots=True)
class RowTrace:
    """A trained row as a conversation with facts."""

    messages: list[dict[str, str]]
    facts: dict[str, Any]


class TracedRows:
    """New rows of RUN/kept_rows, step by step. One thread."""

    def __init__(self, run: Path, folder: Path) -> None:
        self._rows, self._place = run / "kept_rows", folder / "rows_until_step"
        self._last = int(self._place.read_text()) if self._place.exists() else 0

    def new(self, last_step: int) -> Iterator[tuple[int, list[RowTrace]]]:
        """The rows of each step after the last one sent, up to `last_step`."""
        for step in range(self._last + 1, last_step + 1):
            lines = [record(line) for _, line in GrowingFile(self._rows / f"{step:06d}.jsonl").new_lines()]
            rows = [_trace(line) for line in lines if line is not None]
            if rows:
                yield step, rows
            self._last = step
            self._place.write_text(str(step))


def _trace(line: Mapping[str, Any]) -> RowTrace:
    messages = [
        {"role": "user", "content": str(line.get("prompt", ""))},
        {"role": "assistant", "content": str(line.get("completion", ""))},
    ]
    for teacher, text in (line.get("teacher_prompts") or {}).items():
        messages.insert(1, {"role": "system", "content": f"teacher {teacher} read instead: {text}"})
    return RowTrace(messages, {name: line[name] for name in _FACTS if line.get(name) is not None})


class OtlpSpans:
    """Sends new lines of spans.jsonl to a collector by OTLP over HTTP. One thread.

    A row is a trace (its rollout, reward and score), and so is a step (produce, claim, update, publish). Ids are
    hashes of the run's id and the row's key or step.
    """

    def __init__(self, path: Path, folder: Path, run_name: str) -> None:
        trace = importlib.import_module("opentelemetry.sdk.trace")
        self._span, self._api = trace.ReadableSpan, importlib.import_module("opentelemetry.trace")
        resource = importlib.import_module("opentelemetry.sdk.resources").Resource
        self._resource = resource.create({"service.name": "understudy", "understudy.run": run_name})
        exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        self._exporter = exporter.OTLPSpanExporter()
        self._run_id = kept_id(folder, lambda: secrets.token_hex(8))
        self._file, self._place = GrowingFile(path), folder / "spans_until_byte"
        if self._place.exists():
            self._file.place = int(self._place.read_text())
        self._zero = time.time()
        """Time of day of the launch, from the first line of the file."""

    def send_new(self) -> None:
        batch: list[Any] = []
        for offset, line in self._file.new_lines():
            found = record(line)
            if found is None or "start" not in found:
                continue
            if found.get("name") == "launch":
                self._zero = float(found["at"])
            batch.append(self._made(found, offset))
            if len(batch) >= _MOST_SPANS:
                self._send(batch)
                batch = []
        if batch:
            self._send(batch)
        self._place.write_text(str(self._file.place))

    def _send(self, batch: list[Any]) -> None:
        result = self._exporter.export(batch)
        if result.name != "SUCCESS":
            raise ConnectionError(
                f"the collector did not take {len(batch)} spans; see OTEL_EXPORTER_OTLP_ENDPOINT"
            )

    def _made(self, found: Mapping[str, Any], offset: int) -> Any:
        about = {key: value for key, value in found.items() if key not in ("name", "start", "end")}
        whole = about.get("key") or f"step {about.get('step')}" if {"key", "step"} & about.keys() else "run"
        context = self._api.SpanContext(
            trace_id=self._hashed(16, whole),
            span_id=self._hashed(8, f"{whole}/{offset}"),
            is_remote=False,
            trace_flags=self._api.TraceFlags(self._api.TraceFlags.SAMPLED),
        )
        return self._span(
            name=str(found.get("name")),
            context=context,
            resource=self._resource,
            attributes={f"understudy.{key}": _attribute(value) for key, value in about.items()},
            start_time=int((self._zero + float(found["start"])) * 1e9),
            end_time=int((self._zero + float(found["end"])) * 1e9),
        )

    def _hashed(self, size: int, text: str) -> int:
        digest = hashlib.blake2b(f"{self._run_id}/{text}".encode(), digest_size=size).digest()
        return int.from_bytes(digest, "big") or 1

    def close(self) -> None:
        self._exporter.shutdown()


def _attribute(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
