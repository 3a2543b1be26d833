"""The HTTP connection to a replica: errors by status, Retry-After, closing, and no module searches on failures."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from understudy.errors import TeacherError, TeacherUnavailable
from understudy.serving.client import Reply
from understudy.teacher.clients.http import (
    NoSuchRoute,
    NotAllowed,
    NotServing,
    RequestRefused,
    ScoringFailed,
    TeacherChannel,
)
from understudy.trainers.remote_rows.messages import (
    TROUBLES,
    as_error,
    decode_answer,
    encode,
    failed,
    trouble_of,
)


class ImportRecorder:
    """A meta path finder that records which modules are searched for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.names.append(name)


def test_a_failed_request_does_not_search_for_modules_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ImportRecorder()

    async def ask() -> None:
        channel = TeacherChannel("http://127.0.0.1:1", None, "teacher", "r0", connect_timeout=2.0)
        with pytest.raises(TeacherUnavailable):
            await channel.get("/manifest")
        monkeypatch.setattr(sys, "meta_path", [recorder, *sys.meta_path])
        with pytest.raises(TeacherUnavailable):
            await channel.get("/manifest")
        monkeypatch.undo()
        await channel.close()

    asyncio.run(ask())
    assert recorder.names == []


def test_calls_pending_on_a_closed_channel_raise_teacher_unavailable() -> None:
    """When a replica is removed, the pool sends its pending calls to another one, so they must not fail their rows."""

    async def ask() -> None:
        async def send_no_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(send_no_answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        channel = TeacherChannel(f"http://127.0.0.1:{port}", None, "teacher", "r0", max_connections=1)
        under_way, queued = (asyncio.create_task(channel.get("/manifest")) for _ in range(2))
        await asyncio.sleep(0.1)
        await channel.close()
        for late in (under_way, queued, channel.get("/manifest")):
            with pytest.raises(TeacherUnavailable, match="teacher teacher, replica r0"):
                await late
        server.close()

    asyncio.run(asyncio.wait_for(ask(), 20))


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ((408, 429, 502, 503, 504), NotServing),
        ((401, 403), NotAllowed),
        ((404, 405), NoSuchRoute),
        ((400, 413, 422), RequestRefused),
        ((500,), ScoringFailed),
    ],
)
def test_each_http_status_maps_to_its_error_type(statuses: tuple[int, ...], kind: type[TeacherError]) -> None:
    channel = TeacherChannel("http://127.0.0.1:1", None, "teacher", "r0")
    for status in statuses:
        error = channel.refusal("/v1/completions", Reply(status, b"<html>busy</html>", "text/html"))
        assert type(error) is kind and f"({status}): <html>busy</html>" in str(error)
        expected = TeacherUnavailable if kind is NotServing else kind
        assert TROUBLES[trouble_of(error)] is expected, "a worker must report the same type of error"


@pytest.mark.parametrize("seconds", [None, 12.5])
def test_retry_after_survives_the_message_from_a_worker_to_the_pool(seconds: float | None) -> None:
    channel = TeacherChannel("http://127.0.0.1:1", None, "teacher", "r0")
    error = channel.refusal("/v1/completions", Reply(429, b"slowly", "text/plain", seconds))
    assert isinstance(error, TeacherUnavailable) and error.retry_after == seconds
    passed_on = as_error(decode_answer(encode(failed(error))))
    assert isinstance(passed_on, TeacherUnavailable) and passed_on.retry_after == seconds
    assert str(passed_on) == str(error)
    refused = as_error(decode_answer(encode(failed(channel.refusal("/", Reply(400, b"no", "text/plain"))))))
    assert type(refused) is RequestRefused


def test_a_native_503_of_kind_scoring_becomes_scoring_failed() -> None:
    channel = TeacherChannel("http://127.0.0.1:1", None, "teacher", "r0")
    body = b'{"error": {"kind": "scoring", "message": "scoring failed: out of memory"}}'
    assert type(channel.refusal("/v1/score", Reply(503, body, "application/json"))) is ScoringFailed
