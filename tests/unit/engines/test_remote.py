"""The remote engine: load balancing, retries, refusals, checks of answers. The servers are real, on loopback."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.replicas import FIRST_REST_S, REST_AFTER, Replicas
from understudy.engines.servers import engine as engine_module
from understudy.engines.servers.dialects import DIALECTS, PieceRequest
from understudy.engines.servers.engine import RemoteEngine
from understudy.errors import EngineError
from understudy.serving.endpoint import Endpoint
from understudy.types.trajectory import StopReason

Answer = Callable[[dict[str, Any]], Any]


def complete_answer(body: dict[str, Any], *, label: str = "default", **changes: Any) -> dict[str, Any]:
    """A good answer in vLLM's format: as many 7s as were asked for."""
    count = body["sampling_params"]["max_tokens"]
    choice = {
        "finish_reason": "length",
        "token_ids": [7] * count,
        "logprobs": {"content": [{"token_id": 7, "logprob": -0.5} for _ in range(count)]},
        "weight_versions": [{"version": label, "start": 0, "end": count}],
        **changes,
    }
    return {"choices": [choice]}


class Server:
    """Answers requests for tokens with `answer(body)`; a number is an error status."""

    def __init__(self, answer: Answer = complete_answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.label = "default"
        self.dead_behind_its_proxy = False
        self._http: uvicorn.Server | None = None

    @staticmethod
    def truthful() -> "Server":
        """A server whose answers carry the label of its last update."""
        server = Server(lambda body: complete_answer(body, label=server.label))
        return server

    async def handle(self, request: Request) -> Response:
        path = request.url.path
        self.calls.append(path)
        if self.dead_behind_its_proxy:
            return JSONResponse({"error": "vLLM does not answer"}, status_code=502)
        if path != "/inference/v1/generate":
            wanted = await request.json()
            version, self.label = wanted.get("args", ["", ""])[1], wanted.get("new_version", self.label)
            return JSONResponse({"results": [{"version": version}]})
        body = await request.json()
        self.bodies.append(body)
        answer = self.answer(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        return (
            PlainTextResponse("trouble", status_code=answer)
            if isinstance(answer, int)
            else JSONResponse(answer)
        )

    async def start(self) -> Endpoint:
        app = Starlette(routes=[Route("/{path:path}", self.handle, methods=["POST"])])
        self._http = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        )
        self._task = asyncio.create_task(self._http.serve())
        while not self._http.started:
            await asyncio.sleep(0.005)
        return Endpoint(f"http://127.0.0.1:{self._http.servers[0].sockets[0].getsockname()[1]}", token="k3y")

    async def stop(self) -> None:
        assert self._http is not None
        self._http.should_exit = True
        await self._task


def run(servers: list[Server], body: Callable[[RemoteEngine], Any], **settings: Any) -> Any:
    async def inner() -> Any:
        endpoints = [await server.start() for server in servers]
        options = {"model": "student", "max_length": 64, "timeout_s": 1.0, "version": 0, **settings}
        engine = RemoteEngine(DIALECTS["vllm"], endpoints, **options)
        try:
            return await body(engine)
        finally:
            await engine.close()
            for server in servers:
                await server.stop()

    return asyncio.run(asyncio.wait_for(inner(), 60))


def request(key: str = "row", *, new: int = 4, session: str = "", length: int = 3) -> GenerateRequest:
    return GenerateRequest(key, np.arange(3, 3 + length, dtype=np.int32), Sampling(new, (2,)), 11, session)


def test_requests_are_retried_on_another_server_when_one_fails() -> None:
    bad, good = Server(lambda body: 500), Server()

    async def body(engine: RemoteEngine) -> None:
        for generation in await engine.generate([request(f"row-{i}") for i in range(20)]):
            assert generation.tokens.tolist() == [7] * 4 and generation.stop_reason is StopReason.LENGTH
        assert len(good.bodies) == 20
        before = len(bad.bodies)
        await engine.generate([request("later")])
        assert len(bad.bodies) == before, "a server with repeated failures is not used for a while"

    run([bad, good], body, timeout_s=20)


class Busy(Server):
    """Answers its first request with 429 and a time to wait."""

    def __init__(self, seconds: str) -> None:
        super().__init__()
        self._seconds = seconds
        self.asked_at: list[float] = []

    async def handle(self, request: Request) -> Response:
        self.asked_at.append(time.monotonic())
        if len(self.asked_at) == 1:
            return PlainTextResponse("slowly", status_code=429, headers={"Retry-After": self._seconds})
        return await super().handle(request)


@pytest.mark.parametrize(("asked", "waited"), [("1", 1.0), ("3600", 2.0)])
def test_retry_after_sets_the_pause_before_the_next_request_up_to_half_of_its_timeout(
    asked: str, waited: float
) -> None:
    server = Busy(asked)
    (generation,) = run([server], lambda engine: engine.generate([request()]), timeout_s=4.0)
    assert generation.tokens.tolist() == [7] * 4
    first, second = server.asked_at
    assert waited <= second - first < waited + 1.5


def test_the_error_after_all_servers_failed_contains_the_last_failure() -> None:
    with pytest.raises(EngineError, match=r"row within 1 s.*500.*trouble"):
        run([Server(lambda body: 500)], lambda engine: engine.generate([request()]))
    with pytest.raises(EngineError, match=r"row within 1 s.*Cannot connect to host"):

        async def gone(engine: RemoteEngine) -> None:
            await server.stop()
            await engine.generate([request()])

        run([server := Server()], gone)


def test_a_request_answered_with_400_is_not_retried() -> None:
    server = Server(lambda body: 400)
    with pytest.raises(EngineError, match="400"):
        run([server], lambda engine: engine.generate([request()]))
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": {"content": [{"logprob": -0.5}] * 3}}, "3 logprobs for 4 tokens"),
        ({"logprobs": None}, "0 logprobs for 4 tokens"),
        ({"logprobs": {"content": [{"logprob": None}] * 4}}, "None at new token 0"),
        ({"logprobs": {"content": [{"logprob": 0.5}] * 4}}, "0.5 at new token 0"),
        ({"logprobs": {"content": [{"logprob": -9999.0}] * 4}}, "-9999.0 at new token 0"),
        ({"token_ids": [7, -1, 7, 7]}, "no token ids"),
        (
            {"token_ids": [7] * 9, "logprobs": {"content": [{"logprob": -0.5}] * 9}},
            "9 tokens, 4 were asked for",
        ),
        ({"finish_reason": "error"}, "'error'"),
    ],
)
def test_answers_with_wrong_tokens_logprobs_or_finish_reason_are_refused(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineError, match=says):
        run(
            [Server(lambda body: complete_answer(body, **changes))],
            lambda engine: engine.generate([request()]),
            timeout_s=0.2,
        )


def test_an_answer_without_choices_is_refused() -> None:
    with pytest.raises(EngineError, match="no choices"):
        run(
            [Server(lambda body: {"detail": "?"})],
            lambda engine: engine.generate([request()]),
            timeout_s=0.2,
        )


def test_an_answer_labelled_with_other_weights_than_the_published_ones_is_refused(tmp_path: Any) -> None:
    """A server that was restarted without the engine's knowledge answers with the label of its first weights."""
    import torch

    label = "3"
    server = Server(lambda body: complete_answer(body, label=label))

    async def body(engine: RemoteEngine) -> None:
        nonlocal label
        await engine.update_weights(3, [("w", torch.ones(2))])
        assert (await engine.generate([request()]))[0].weight_versions.tolist() == [3] * 4
        label = "default"
        with pytest.raises(EngineError, match="calls default; expected 3"):
            await engine.generate([request()])

    run([server], body, snapshots=tmp_path)


def test_requests_carry_token_ids_seed_and_a_cache_salt_of_the_weight_version(tmp_path: Any) -> None:
    server = Server()
    run([server], lambda engine: engine.generate([request()]), version=5)
    (body,) = server.bodies
    assert body["token_ids"] == [3, 4, 5] and body["cache_salt"] == "weights-5"

    async def across_an_update(engine: RemoteEngine) -> None:
        await engine.generate([request()])
        await engine.update_weights(6, [("w", torch.zeros(1))])
        await engine.generate([request()])

    run([renewed := Server.truthful()], across_an_update, version=5, snapshots=tmp_path)
    assert [one["cache_salt"] for one in renewed.bodies] == ["weights-5", "weights-6"]
    assert "/reset_prefix_cache" in renewed.calls
    params = body["sampling_params"]
    assert (params["seed"], params["stop_token_ids"], params["ignore_eos"], params["detokenize"]) == (
        11,
        [2],
        True,
        False,
    )


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_requests_with_stop_strings_keep_special_tokens_in_the_decoded_text(dialect: str) -> None:
    def sent(*stops: str) -> dict[str, Any]:
        ask = GenerateRequest("row", np.array([3], np.int32), Sampling(4, stop_strings=stops), 1)
        body = DIALECTS[dialect].body(PieceRequest(ask, ask.tokens, 4, 1, salt="", model="student"))
        params: dict[str, Any] = body.get("sampling_params", body)
        return {name: params[name] for name in params if "special_tokens" in name}

    assert sent("<|im_start|>") == {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert sent() == {}


def test_an_unseeded_engine_sends_no_seed_even_to_continue_a_generation() -> None:
    answers = iter([{"token_ids": [7], "finish_reason": "abort"}, {}])

    def in_two_pieces(body: dict[str, Any]) -> dict[str, Any]:
        changes = next(answers)
        if changes:
            changes["logprobs"] = {"content": [{"token_id": 7, "logprob": -0.5}]}
        return complete_answer(body, **changes)

    server = Server(in_two_pieces)
    (generation,) = run([server], lambda engine: engine.generate([request(new=4)]), seeded=False)
    assert len(generation.tokens) == 4
    assert [("seed" in body["sampling_params"]) for body in server.bodies] == [False, False]


def test_an_aborted_generation_is_continued_from_its_tokens_with_another_seed() -> None:
    """The server returns two tokens at a time as aborted, and the engine requests the rest."""

    def interrupted(body: dict[str, Any]) -> dict[str, Any]:
        count = body["sampling_params"]["max_tokens"]
        if count <= 2:
            return complete_answer(body)
        content = [{"logprob": -0.25}] * 2
        return complete_answer(
            body, finish_reason="abort", token_ids=[count, count], logprobs={"content": content}
        )

    server = Server(interrupted)
    (generation,) = run([server], lambda engine: engine.generate([request(new=6)]))
    assert generation.tokens.tolist() == [6, 6, 4, 4, 7, 7]
    assert generation.stop_reason is StopReason.LENGTH
    assert [body["token_ids"] for body in server.bodies] == [
        [3, 4, 5],
        [3, 4, 5, 6, 6],
        [3, 4, 5, 6, 6, 4, 4],
    ]
    assert len({body["sampling_params"]["seed"] for body in server.bodies}) == 3


def spelling(pieces: list[str], finish: str = "length") -> Server:
    """A server whose tokens are characters. It returns these texts one by one, each but the last as aborted."""
    left = list(pieces)

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        text = left.pop(0)
        top = [{"token_id": 1, "logprob": -0.1}, {"token_id": 2, "logprob": -0.2}]
        content = [{"logprob": -0.1 * i, "top_logprobs": top} for i in range(1, len(text) + 1)]
        ids, why = [ord(c) for c in text], "abort" if left else finish
        return complete_answer(body, token_ids=ids, finish_reason=why, logprobs={"content": content})

    return Server(answer)


@pytest.mark.parametrize(
    ("pieces", "finish", "expected", "reason"),
    [
        (["ab\nUs", "er: more"], "length", "ab\nUser:", StopReason.STOP_STRING),
        (["ab\n", "Us", "er", ": more"], "length", "ab\nUser:", StopReason.STOP_STRING),
        (["ab\nUser", ":"], "length", "ab\nUser:", StopReason.STOP_STRING),
        (["ab\nUser", ":"], "stop", "ab\nUser:", StopReason.EOS),
        (["ab\nUs", "ing tools"], "length", "ab\nUsing tools", StopReason.LENGTH),
        (["ab\nUs", "ing tools\nUs", "er:er:"], "length", "ab\nUsing tools\nUser:", StopReason.STOP_STRING),
    ],
)
def test_a_stop_string_split_over_two_pieces_ends_the_generation(
    pieces: list[str], finish: str, expected: str, reason: StopReason
) -> None:
    """A server looks for stop strings in the tokens it draws, and not in its prompt, which contains the earlier
    pieces."""
    server = spelling(pieces, finish)
    sampling = Sampling(40, stop_strings=("\nUser:", "|"), candidates=1)

    async def body(engine: RemoteEngine) -> None:
        asked = GenerateRequest("row", np.array([3], np.int32), sampling, 1)
        (generation,) = await engine.generate([asked])
        assert "".join(map(chr, generation.tokens)) == expected and generation.stop_reason is reason
        assert len(generation.logprobs) == len(generation.weight_versions) == len(expected)
        assert generation.candidate_ids is not None and generation.candidate_ids.tolist() == [[1]] * len(
            expected
        )
        assert len(server.bodies) == len(pieces)

    run([server], body, detokenize=lambda ids: "".join(map(chr, ids)), timeout_s=20)


def test_sessions_stay_on_their_server_and_load_is_balanced() -> None:
    servers = [Server(), Server()]

    async def body(engine: RemoteEngine) -> None:
        for _ in range(3):
            await engine.generate([request("a", session="s1"), request("b", session="s2")])

    run(servers, body)
    assert [len(server.bodies) for server in servers] == [3, 3]


def test_a_request_to_a_hanging_server_is_retried_on_another_after_the_deadline() -> None:
    async def hang(body: dict[str, Any]) -> Any:
        await asyncio.sleep(2)
        return complete_answer(body)

    slow, good = Server(hang), Server()

    async def body(engine: RemoteEngine) -> None:
        generations = await engine.generate([request(f"r{i}") for i in range(2)])
        assert len(generations) == 2 and len(good.bodies) == 2

    run([slow, good], body, deadline_s=0.2, deadline_per_token_s=0.0, timeout_s=20)


def test_time_a_server_spent_generating_before_it_failed_does_not_count_as_retry_time() -> None:

    async def late(body: dict[str, Any]) -> Any:
        await asyncio.sleep(1.0)
        return 500

    bad, good = Server(late), Server()

    async def body(engine: RemoteEngine) -> None:
        (generation,) = await engine.generate([request()])
        assert len(generation.tokens) == 4 and len(bad.bodies) == len(good.bodies) == 1

    run([bad, good], body, timeout_s=0.8)


def test_a_request_fails_if_all_servers_still_fail_late_after_the_retry_time() -> None:
    async def late(body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.5)
        return 500

    servers = [Server(late), Server(late)]
    with pytest.raises(EngineError, match=r"row within 0\.8 s of retries.*trouble"):
        run(servers, lambda engine: engine.generate([request()]), timeout_s=0.8)
    assert sum(len(server.bodies) for server in servers) == 4


def test_requests_at_a_withdrawn_server_are_retried_on_another_at_once() -> None:
    """A machine that lost power does not close its connections, but the launcher knows that it is gone."""
    asked, release = asyncio.Event(), asyncio.Event()

    async def hang(body: dict[str, Any]) -> Any:
        asked.set()
        await release.wait()
        return 500

    silent, good = Server(hang), Server()

    async def body(engine: RemoteEngine) -> None:
        writing = asyncio.create_task(engine.generate([request(f"r{i}") for i in range(4)]))
        await asked.wait()
        engine.withdraw("replica-0")
        generations = await asyncio.wait_for(writing, 20)
        release.set()
        assert [len(one.tokens) for one in generations] == [4] * 4 and len(good.bodies) == 4

    run([silent, good], body, timeout_s=20)


def test_a_request_held_by_a_paused_server_is_repeated_with_the_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the server would hold it until it is resumed, and the publish would wait for its answer."""
    monkeypatch.setattr(engine_module, "QUIET_S", 0.2)
    asked, release = asyncio.Event(), asyncio.Event()

    async def keep_the_first(body: dict[str, Any]) -> Any:
        if not asked.is_set():
            asked.set()
            await release.wait()
        return complete_answer(body, label=server.label)

    server = Server(keep_the_first)

    async def body(engine: RemoteEngine) -> None:
        writing = asyncio.create_task(engine.generate([request()]))
        await asked.wait()
        await asyncio.wait_for(engine.update_weights(1, [("w", torch.zeros(2))]), 20)
        (generation,) = await writing
        release.set()
        assert generation.weight_versions.tolist() == [1] * 4
        assert [one["cache_salt"] for one in server.bodies] == ["weights-0", "weights-1"]

    run([server], body, snapshots=tmp_path, timeout_s=20)


def test_requests_are_balanced_by_outstanding_tokens() -> None:
    replicas = Replicas([Endpoint("a"), Endpoint("b")], clock=lambda: 0.0)
    first = replicas.pick("", 1000)
    assert all(replicas.pick("", 100) is not first for _ in range(9)), (
        "nine small requests weigh less than the large one"
    )
    replicas.succeeded(first, 1000)  # type: ignore[arg-type]
    assert replicas.pick("", 1) is first


def test_a_failing_replica_loses_its_sessions_and_a_replica_that_is_back_is_picked_again() -> None:
    now = 0.0
    replicas = Replicas([Endpoint("a"), Endpoint("b")], clock=lambda: now)
    preferred = replicas.pick("session", 10)
    assert preferred is not None
    for _ in range(REST_AFTER):
        replicas.failed(preferred, 10)
        preferred.outstanding_tokens += 10
    preferred.outstanding_tokens = 0
    other = replicas.pick("session", 10)
    assert other is not preferred and replicas.pick("session", 10) is other, (
        "the session moved to the other replica and stays there"
    )
    now = FIRST_REST_S + 0.01
    assert preferred in [replicas.pick(f"new {number}", 10) for number in range(8)]
    for replica in replicas.all:
        replicas.gone(replica)
    assert replicas.pick("x", 1) is None
    replicas.back(preferred)
    assert replicas.pick("x", 1) is preferred


def test_a_replica_that_sent_retry_after_is_not_picked_before_that_time() -> None:
    now = 0.0
    replicas = Replicas([Endpoint("a"), Endpoint("b")], clock=lambda: now)
    busy = replicas.all[0]
    for wait in (20.0, 5.0):
        replicas.failed(busy, 0, wait)
    assert busy.failures == 0 and busy.resting_until == 20.0
    assert all(replicas.pick(str(i), 1) is replicas.all[1] for i in range(4))
    now = 20.0
    assert replicas.pick("x", 1) is busy
    replicas.gone(busy)
    replicas.failed(busy, 0, 5.0)
    now = 1e6
    assert replicas.pick("y", 1) is replicas.all[1], "a replica that is gone stays gone"


def test_a_replica_that_failed_fast_is_not_picked_as_idle() -> None:
    now = 0.0
    replicas = Replicas([Endpoint("a"), Endpoint("b")], clock=lambda: now)
    failing = replicas.pick("", 100)
    assert failing is not None
    replicas.failed(failing, 100)
    assert replicas.pick("", 100) is not failing
    now = 60.0
    assert failing.weight(now)[0] < 1


def test_a_replica_that_is_gone_is_not_picked_again_after_later_failures() -> None:
    now = 0.0
    replicas = Replicas([Endpoint("a"), Endpoint("b")], clock=lambda: now)
    gone = replicas.all[0]
    replicas.gone(gone)
    for _ in range(2 * REST_AFTER):
        replicas.failed(gone, 10)
    now = 1e6
    assert all(replicas.pick(str(i), 1) is replicas.all[1] for i in range(4)), "its weights may be old"
