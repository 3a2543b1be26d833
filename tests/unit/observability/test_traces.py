"""Rows as traces in trackio and spans at an OTLP collector, with the real packages."""

import gzip
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from recorded_run import HOSTILE, summary, token_columns

from understudy.dataplane.kept_rows import RowKeeper
from understudy.observability.loggers.logged_metrics import LoggedMetrics
from understudy.observability.metrics import read_metrics
from understudy.observability.spans import Spans

_TRACKIO_CHILD = """
import sys, json
from pathlib import Path
from understudy.observability.loggers.logged_metrics import LoggedMetrics
folder, first = Path(sys.argv[1]), int(sys.argv[2])
warnings = []
metrics = LoggedMetrics(folder / "metrics.jsonl", ["trackio"], run_name="trial", warn=warnings.append)
for step in range(first, first + 2):
    metrics.write(step, {"actor/loss": 1.0 / step})
metrics.close()
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps({"warnings": warnings, "traces": SQLiteStorage.get_traces("understudy", "trial")}))
"""


def test_trackio_holds_each_kept_row_once_as_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume that repeats a step does not add its rows again. The traces are read with the real package."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "loggers" / "trackio"))
    keeper = RowKeeper(tmp_path / "kept_rows", 1 << 20)
    for step in (1, 2, 3):
        keeper.write(
            step, [(summary(f"p{step}_0_0", token_columns(step), prompt=HOSTILE), token_columns(step))]
        )
    for first in (1, 2):
        command = [sys.executable, "-c", _TRACKIO_CHILD, str(tmp_path), str(first)]
        report = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )
        assert report["warnings"] == []
    traces = sorted(report["traces"], key=lambda trace: int(trace["step"]))
    assert [int(trace["step"]) for trace in traces] == [1, 2, 3]
    for trace in traces:
        prompt, answer = trace["messages"]
        assert (prompt["role"], prompt["content"]) == ("user", HOSTILE) and answer["content"] == "answer"
        facts = trace["metadata"]
        assert facts["key"] == f"p{trace['step']}_0_0" and facts["reward"] == 1.0 and facts["kl"] == 0.5


class Collector(BaseHTTPRequestHandler):
    """Receives OTLP over HTTP, as a collector does."""

    received: ClassVar[list[Any]] = []
    status: ClassVar[int] = 200

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        if self.status == 200:
            self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Collector]]:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="the opentelemetry extra is not installed"
    )
    Collector.received, Collector.status = [], 200
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield Collector
    server.shutdown()
    server.server_close()


def test_each_span_of_two_launches_reaches_the_otlp_collector_once(
    tmp_path: Path, collector: type[Collector]
) -> None:
    before = time.time()
    for launch in (1, 2):
        spans = Spans(tmp_path / "spans.jsonl")
        metrics = LoggedMetrics(
            tmp_path / "metrics.jsonl", ["opentelemetry"], run_name="trial", warn=(warnings := []).append
        )
        with spans.span("update", step=launch):
            time.sleep(0.02)
        with (
            spans.span("rollout", key=f"p{launch}_0_0"),
            spans.span("score", key=f"p{launch}_0_0", teacher="add"),
        ):
            pass
        spans.event("teacher add: replica 0 was restarted")
        spans.flush()
        metrics.write(launch, {"actor/loss": 1.0})
        spans.close()
        metrics.close()
        assert warnings == []
    sent = [
        ({one.key: one.value.string_value for one in resource.resource.attributes}, span)
        for request in collector.received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert Counter(span.name for _, span in sent) == dict.fromkeys(
        ("launch", "update", "rollout", "score", "event"), 2
    )
    assert len({span.span_id for _, span in sent}) == 10
    assert {facts["understudy.run"] for facts, _ in sent} == {"trial"}
    ours = {span.name: span for _, span in sent[:5]}
    assert ours["rollout"].trace_id == ours["score"].trace_id != ours["update"].trace_id
    assert ours["update"].end_time_unix_nano - ours["update"].start_time_unix_nano >= 20_000_000
    for _, span in sent:
        assert before - 1 <= span.start_time_unix_nano / 1e9 <= time.time() + 1
    attributes = {one.key: one.value for one in ours["score"].attributes}
    assert (
        attributes["understudy.teacher"].string_value == "add"
        and attributes["understudy.key"].string_value == "p1_0_0"
    )


def test_a_collector_that_refuses_spans_causes_one_warning_and_metrics_are_still_written(
    tmp_path: Path, collector: type[Collector]
) -> None:
    collector.status = 400
    spans = Spans(tmp_path / "spans.jsonl")
    metrics = LoggedMetrics(tmp_path / "metrics.jsonl", ["opentelemetry"], warn=(warnings := []).append)
    spans.flush()
    for step in (1, 2):
        metrics.write(step, {"actor/loss": 1.0})
    metrics.close()
    assert len(warnings) == 1 and "OTEL_EXPORTER_OTLP_ENDPOINT" in warnings[0]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
