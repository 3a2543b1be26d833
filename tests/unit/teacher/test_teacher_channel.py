"""The connection to a replica does not look for what is not there."""

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


class Searches:
    """The first to be asked for a module that has not been imported."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.names.append(name)


def test_requests_search_for_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches()

    async def ask() -> None:
        channel = TeacherChannel("http://127.0.0.1:1", None, "teacher", "r0", connect_timeout=2.0)
        with pytest.raises(TeacherUnavailable):
            await channel.get("/manifest")
        monkeypatch.setattr(sys, "meta_path", [searches, *sys.meta_path])
        with pytest.raises(TeacherUnavailable):
            await channel.get("/manifest")
        monkeypatch.undo()
        await channel.close()

    asyncio.run(ask())
    assert searches.names == []


def test_a_replica_that_has_left_is_unavailable_to_whoever_still_asks() -> None:
    """Calls stand in line for a replica; when it is taken out, they must go to another one and not fail their rows."""

    async def ask() -> None:
        async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        channel = TeacherChannel(f"http://127.0.0.1:{port}", None, "teacher", "r0", max_connections=1)
        under_way, in_line = (asyncio.create_task(channel.get("/manifest")) for _ in range(2))
        await asyncio.sleep(0.1)
        await channel.close()
        for late in (under_way, in_line, channel.get("/manifest")):
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
def test_a_gateways_status_is_not_the_rows_fault(statuses: tuple[int, ...], kind: type[TeacherError]) -> None:
    channel = TeacherChannel("http://127.0.0.1:1", None, "teacher", "r0")
    for status in statuses:
        error = channel.refusal("/v1/completions", Reply(status, b"<html>busy</html>", "text/html"))
        assert type(error) is kind and f"({status}): <html>busy</html>" in str(error)
        expected = TeacherUnavailable if kind is NotServing else kind
        assert TROUBLES[trouble_of(error)] is expected, "a worker passes it on as what it is"


@pytest.mark.parametrize("seconds", [None, 12.5])
def test_the_time_that_a_server_asks_for_reaches_the_pool_from_a_worker_too(seconds: float | None) -> None:
    channel = TeacherChannel("http://127.0.0.1:1", None, "teacher", "r0")
    error = channel.refusal("/v1/completions", Reply(429, b"slowly", "text/plain", seconds))
    assert isinstance(error, TeacherUnavailable) and error.retry_after == seconds
    passed_on = as_error(decode_answer(encode(failed(error))))
    assert isinstance(passed_on, TeacherUnavailable) and passed_on.retry_after == seconds
    assert str(passed_on) == str(error)
    refused = as_error(decode_answer(encode(failed(channel.refusal("/", Reply(400, b"no", "text/plain"))))))
    assert type(refused) is RequestRefused


def test_a_native_replica_that_could_not_score_names_the_request() -> None:
    channel = TeacherChannel("http://127.0.0.1:1", None, "teacher", "r0")
    body = b'{"error": {"kind": "scoring", "message": "scoring failed: out of memory"}}'
    assert type(channel.refusal("/v1/score", Reply(503, body, "application/json"))) is ScoringFailed
