"""A real replica process over HTTP: correct scores, clear refusals, and it keeps serving after invalid requests."""

import asyncio
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from teacher_rig import TOKEN, VOCAB, ReplicaForkServer, await_ready, random_items, spawn_replica

from understudy.teacher.clients.http import RequestRefused
from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.protocol import CONTENT_TYPE, encode_request, request_of
from understudy.teacher.replica.server import main
from understudy.teacher.scoring.head import from_wire
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer
from understudy.teacher.vocabulary import Vocabulary
from understudy.types.scores import ScoreItem, Signal, TeacherScores

AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}
HTTP = httpx.Client(timeout=60)


def scored(url: str, items: list[ScoreItem]) -> list[TeacherScores]:
    async def ask() -> list[TeacherScores]:
        async with ReplicaClient(url, TOKEN, teacher="math", replica="a") as client:
            return await client.score(items)

    return asyncio.run(ask())


def still_scores(url: str) -> bool:
    return len(scored(url, random_items(2, 9, Signal.TOPK, 4))) == 2


def post(url: str, body: bytes, **headers: str) -> httpx.Response:
    return HTTP.post(
        f"{url}/v1/score", content=body, headers={**AUTHORISED, "Content-Type": CONTENT_TYPE, **headers}
    )


def frame(items: list[ScoreItem]) -> bytes:
    return encode_request(request_of(items))


def test_scores_over_http_equal_the_scorers_own_to_the_bit(server: str, model: Path) -> None:
    items = (
        random_items(20, 1, Signal.TOPK, 8)
        + random_items(3, 2, Signal.AT_IDS, 4)
        + random_items(2, 3, Signal.HIDDEN)
    )
    here = Scorer("math", load_frozen(str(model))).score(request_of(items)).split()
    for sent, own in zip(scored(server, items), here, strict=True):
        assert sent.key == own.key and sent.teacher == "math"
        for name in ("sampled_logprobs", "ids", "logprobs", "hidden"):
            np.testing.assert_array_equal(getattr(sent, name), getattr(own, name), err_msg=name)


def test_scores_do_not_depend_on_concurrent_requests(server: str) -> None:
    """Concurrent requests are never merged (batching = by_request)."""
    requests = [random_items(6, seed, Signal.TOPK, 4) for seed in range(12)]
    alone = [scored(server, items) for items in requests]

    async def together() -> list[list[TeacherScores]]:
        async with ReplicaClient(server, TOKEN) as client:
            return await asyncio.gather(*(client.score(items) for items in requests))

    for first, second in zip(alone, asyncio.run(together()), strict=True):
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_a_replica_reports_manifest_vocabulary_head_health_and_metrics(server: str, model: Path) -> None:
    async def ask() -> None:
        async with ReplicaClient(server, TOKEN) as client:
            manifest = await client.manifest()
            assert (
                manifest.teacher == "math" and manifest.model == str(model) and manifest.vocab_size == VOCAB
            )
            assert manifest.limits.max_length == 64 and len(manifest.weights_sha256) == 64
            vocabulary = await client.vocabulary()
            assert vocabulary.fingerprint == manifest.vocab_fingerprint == Vocabulary.load(model).fingerprint
            head = from_wire(await client.head())
            assert head.weight_VH.shape == (VOCAB, manifest.hidden_size)
            assert await client.health()
            text = await client.metrics()
            assert 'understudy_teacher_requests_total{teacher="math"}' in text
            assert "understudy_teacher_waiting_tokens" in text

    asyncio.run(ask())


def test_scores_and_manifest_carry_the_name_that_the_recipe_gives_the_teacher(server: str) -> None:
    async def ask() -> set[str]:
        async with ReplicaClient(server, TOKEN, teacher="tutor", replica="a") as client:
            scores = await client.score(random_items(2, 9, Signal.TOPK, 4))
            return {(await client.manifest()).teacher, *(one.teacher for one in scores)}

    assert asyncio.run(ask()) == {"tutor"}


@pytest.mark.parametrize(
    "path", ["/v1/score", "/v1/head", "/v1/vocabulary", "/manifest", "/metrics", "/nothing"]
)
@pytest.mark.parametrize("token", [None, "wrong", TOKEN + "x", TOKEN[:-1]])
def test_every_route_but_health_needs_the_token(server: str, path: str, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    assert (
        HTTP.request("POST" if path == "/v1/score" else "GET", server + path, headers=headers).status_code
        == 401
    )
    assert HTTP.get(f"{server}/health", headers=headers).status_code == 200


def test_a_replica_without_a_token_answers_only_loopback_host_headers(
    model: Path, fork_server: ReplicaForkServer
) -> None:
    """A web page that attacks by DNS rebinding sends its own name in the Host header."""
    url = asyncio.run(fork_server.fork(model, ["--token-env", "NO_SUCH_VARIABLE"]).ready()).url
    assert HTTP.get(f"{url}/manifest").status_code == 200
    assert HTTP.get(f"{url}/manifest", headers={"Host": "localhost:1"}).status_code == 200
    assert HTTP.get(f"{url}/manifest", headers={"Host": "[::1]:1"}).status_code == 200
    refused = HTTP.get(f"{url}/manifest", headers={"Host": "evil.example"})
    assert refused.status_code == 403 and refused.json()["error"]["kind"] == "host"


def over_long() -> bytes:
    return frame([ScoreItem("long", np.zeros(65, np.int32), np.array([1], np.int32), Signal.SAMPLED)])


def outside(token: int) -> bytes:
    return frame(
        [ScoreItem("odd", np.array([1, 2, token], np.int32), np.array([1], np.int32), Signal.SAMPLED)]
    )


def named_outside() -> bytes:
    ids = np.array([[1, VOCAB]], np.int32)
    return frame(
        [ScoreItem("named", np.array([1, 2], np.int32), np.array([1], np.int32), Signal.AT_IDS, ids=ids)]
    )


@pytest.mark.parametrize(
    ("make", "status", "kind", "message"),
    [
        (lambda: b"", 400, "frame", "24 bytes"),
        (lambda: b"x" * 500, 400, "frame", "starts with"),
        (lambda: frame(random_items(3))[:-4], 400, "frame", "promises"),
        (over_long, 413, "length", "'long' has 65 tokens; a sequence may have 64"),
        (lambda: frame(random_items(120, 0, lengths=(60, 62))), 413, "tokens", "at most 5000"),
        (lambda: b"x" * 100_001, 413, "bytes", "100001 bytes; at most 100000"),
        (lambda: frame(random_items(1, 0, Signal.TOPK, 17)), 400, "k", "K = 17; at most 16"),
        (lambda: outside(VOCAB), 400, "ids", f"'odd': token id {VOCAB} at position 2"),
        (lambda: outside(-1), 400, "ids", "token id -1"),
        (named_outside, 400, "ids", f"id {VOCAB} named"),
        (lambda: frame([]), 400, "empty", "at least one"),
    ],
)
def test_a_replica_refuses_invalid_requests_with_status_kind_and_reason(
    server: str, make, status: int, kind: str, message: str
) -> None:
    response = post(server, make())
    assert response.status_code == status
    error = response.json()["error"]
    assert error["kind"] == kind and message in error["message"]
    assert still_scores(server)


def test_a_streamed_body_beyond_the_byte_limit_is_refused(server: str) -> None:
    def endless():
        for _ in range(200):
            yield b"x" * 1000

    response = HTTP.post(f"{server}/v1/score", content=endless(), headers=AUTHORISED)
    assert response.status_code == 413 and still_scores(server)


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_frames_get_a_4xx_answer_or_scores(server: str, data: st.DataObject) -> None:
    damaged = bytearray(frame(random_items(3, 1, Signal.TOPK, 4) + random_items(1, 2, Signal.AT_IDS, 2)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    assert post(server, bytes(damaged)).status_code in (200, 400, 413)
    assert HTTP.get(f"{server}/health").status_code == 200


def test_a_refusal_becomes_an_error_that_names_the_replica(server: str) -> None:
    with pytest.raises(RequestRefused, match=r"teacher math, replica a: /v1/score refused \(400\): K = 17"):
        scored(server, random_items(1, 0, Signal.TOPK, 17))


def test_health_is_answered_while_a_forward_runs(server: str) -> None:
    """The forward runs in its own thread, so /health does not wait for the queue."""
    frames = [frame(random_items(80, seed, Signal.TOPK, 16, lengths=(50, 60))) for seed in range(12)]

    async def ask() -> int:
        answered = 0
        async with httpx.AsyncClient(base_url=server, headers=AUTHORISED, timeout=60) as http:
            scoring = asyncio.gather(*(http.post("/v1/score", content=body) for body in frames))
            while not scoring.done():
                answered += (await http.get("/health")).status_code == 200 and not scoring.done()
            assert [response.status_code for response in await scoring] == [200] * len(frames)
        return answered

    assert asyncio.run(ask()) >= 3


def test_requests_of_a_disconnected_client_leave_the_queue(server: str) -> None:
    frames = [frame(random_items(80, seed, Signal.TOPK, 16, lengths=(50, 60))) for seed in range(8)]

    async def waiting_requests(http: httpx.AsyncClient) -> int:
        text = (await http.get("/metrics")).text
        return int(re.findall(r"^understudy_teacher_waiting_requests\{.*\} (\d+)$", text, re.MULTILINE)[0])

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=server, headers=AUTHORISED, timeout=60) as http:
            scoring = [asyncio.create_task(http.post("/v1/score", content=body)) for body in frames]
            while await waiting_requests(http) < 3:
                await asyncio.sleep(0.001)
            for task in scoring:
                task.cancel()
            before = time.monotonic()
            while await waiting_requests(http):
                assert time.monotonic() - before < 30
                await asyncio.sleep(0.02)

    asyncio.run(ask())
    assert still_scores(server)


def refused_start(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The last line printed by a replica that cannot start. Asserts exit code 2 and no traceback."""
    assert main(["--name", "math", *argv]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed.strip().splitlines()[-1]


def test_a_replica_exits_with_a_one_line_error_when_its_port_is_in_use(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused_start(capsys, "--model", str(model), "--bind", bind)
    assert line.startswith(f"error: cannot bind {bind}: ") and line.endswith(
        "choose another port, or 0 for a free one"
    )


def test_a_replica_refuses_a_non_loopback_bind_without_a_token(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNDERSTUDY_TOKEN", raising=False)
    for bind in ("0.0.0.0:0", "[::]:0", "192.0.2.7:8000"):
        assert "refused without a token" in refused_start(capsys, "--model", str(model), "--bind", bind)
    assert "expected HOST:PORT" in refused_start(capsys, "--model", str(model), "--bind", "8000")


def test_a_replica_exits_with_a_one_line_error_for_a_missing_model_or_too_long_max_length(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "error: no model at" in refused_start(capsys, "--model", str(tmp_path / "nowhere"))
    line = refused_start(capsys, "--model", str(model), "--max-length", "100000")
    assert "--max-length 100000" in line and "holds 256 positions" in line


def test_a_replica_exits_when_its_launchers_pipe_closes(model: Path, tmp_path: Path) -> None:
    """The pipe closes when its launcher dies."""
    orphan = spawn_replica(model, tmp_path)
    try:
        await_ready(orphan, tmp_path)
        os.close(orphan.watch)
        orphan.watch = -1
        assert orphan.process.wait(10) == 3
    finally:
        orphan.end()


def test_a_replica_exits_with_code_0_on_sigterm(model: Path, fork_server: ReplicaForkServer) -> None:
    polite = fork_server.fork(model, ["--batching", "by_arrival"])
    url = asyncio.run(polite.ready()).url
    assert json.loads((polite.folder / "ready.json").read_text()) == {"url": url, "pid": polite.pid}
    merged = [scored(url, random_items(4, seed, Signal.TOPK, 4)) for seed in range(3)]
    assert [s.key for s in merged[2]] == [f"row-2-{i}" for i in range(4)]
    polite.signal(signal.SIGTERM)
    assert polite.exit_code(20) == 0
