"""One suite for every backend (native, vLLM's two routes, SGLang, OpenAI's echo): scores equal a plain forward's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import completion_servers
import numpy as np
import pytest
import torch
from completion_servers import FakeCompletions, running
from starlette.requests import Request
from starlette.responses import Response
from teacher_rig import TOKEN, VOCAB, random_items
from transformers import AutoModelForCausalLM
from vision_models import folder_of, picture, reader_of

from understudy.errors import TeacherError, TeacherReplyError
from understudy.media.store import MediaStore
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.completions import CompletionsClient, Route
from understudy.teacher.clients.discover import Backend, connect_external
from understudy.teacher.clients.http import NotServing, RequestRefused, ScoringFailed
from understudy.teacher.clients.native import ReplicaClient, ScoringClient
from understudy.teacher.manifest import Manifest
from understudy.teacher.pool.integrity import check_signals, identify
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.metrics import PoolMetrics
from understudy.teacher.pool.pool import TeacherPool
from understudy.teacher.scoring.probe import probe_items
from understudy.trainers.call_batching import BatchByArrival, BatchByKey, BatchSplit, CallBatcher, CallQueue
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

FLAVOURS = ["vllm", "old vllm", "sglang", "echo with ids", "echo as text", "no echo"]


@pytest.fixture(scope="module")
def fakes(model: Path) -> Iterator[dict[str, tuple[FakeCompletions, str]]]:
    with_urls: dict[str, tuple[FakeCompletions, str]] = {}
    stack = []
    for flavour in FLAVOURS:
        fake = FakeCompletions(model, flavour)
        context = running(fake)
        stack.append(context)
        with_urls[flavour] = (fake, context.__enter__())
    yield with_urls
    for context in stack:
        context.__exit__(None, None, None)


def using(client: ScoringClient, ask: Callable[[ScoringClient], Awaitable[object]]) -> object:
    async def run() -> object:
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(run())


def completions(url: str, **changes: object) -> CompletionsClient:
    return CompletionsClient(url, teacher="math", replica="a", vocab_size=VOCAB, **changes)


def assert_plain(
    model: Path, items: list[ScoreItem], scores: list[TeacherScores], atol: float = 1e-4
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for item, score in zip(items, scores, strict=True):
        with torch.inference_mode():
            logits = reference(input_ids=torch.from_numpy(item.tokens.astype(np.int64))[None]).logits[0]
        plain = logits.log_softmax(-1).numpy()[item.positions - 1]
        own = np.take_along_axis(plain, item.tokens[item.positions][:, None], 1)[:, 0]
        np.testing.assert_allclose(score.sampled_logprobs, own, atol=atol)
        assert score.key == item.key and score.teacher == "math"
        if item.signal is Signal.TOPK:
            assert score.ids is not None and score.logprobs is not None
            np.testing.assert_allclose(score.logprobs, np.sort(plain, 1)[:, ::-1][:, : item.k], atol=atol)
            np.testing.assert_allclose(np.take_along_axis(plain, score.ids, 1), score.logprobs, atol=atol)


BACKENDS = {
    "native": [Signal.SAMPLED, Signal.TOPK],
    "vllm": [Signal.SAMPLED, Signal.TOPK],
    "old vllm": [Signal.SAMPLED, Signal.TOPK],
    "sglang": [Signal.SAMPLED, Signal.TOPK],
    "echo with ids": [Signal.SAMPLED, Signal.TOPK],
    "echo as text": [Signal.SAMPLED],
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_gives_the_scores_of_a_plain_transformers_forward(
    backend: str, model: Path, server: str, fakes: dict[str, tuple[FakeCompletions, str]]
) -> None:
    items = [item for s in BACKENDS[backend] for item in random_items(4, 3, s, 4 if s is Signal.TOPK else 0)]
    native = ReplicaClient(server, TOKEN, teacher="math", replica="a")
    client: ScoringClient = native if backend == "native" else completions(fakes[backend][1])
    scores = using(client, lambda c: c.score(items))
    assert isinstance(scores, list)
    assert_plain(model, items, scores)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_can_be_identified_by_its_scores(
    backend: str, server: str, fakes: dict[str, tuple[FakeCompletions, str]]
) -> None:
    native = ReplicaClient(server, TOKEN, teacher="math")
    client: ScoringClient = native if backend == "native" else completions(fakes[backend][1])
    identity = using(client, identify)
    assert len(identity.probe_logprobs) == 11  # type: ignore[attr-defined]


def test_a_429_during_the_probe_does_not_select_another_route(model: Path) -> None:
    """A 429 on the first route once made it look like an older server with fewer candidates."""

    class Overloaded(FakeCompletions):
        async def generate(self, http: Request) -> Response:
            if not self.turned_away:
                self.turned_away = True
                return self.refuse("slowly", 429)
            return await super().generate(http)

    fake = Overloaded(model, "vllm")
    fake.turned_away = False
    with running(fake) as url:

        async def twice(client: ScoringClient) -> Manifest:
            with pytest.raises(NotServing, match="slowly"):
                await client.manifest()
            return await client.manifest()

        found = using(completions(url), twice)
    assert isinstance(found, Manifest) and found.limits.max_k == completion_servers.MAX_LOGPROBS


def test_a_pool_scores_with_external_vllm_servers(
    model: Path, fakes: dict[str, tuple[FakeCompletions, str]]
) -> None:
    async def run() -> list[TeacherScores]:
        replicas = [ReplicaSpec(name, Endpoint(fakes["vllm"][1])) for name in "ab"]
        pool = TeacherPool("math", replicas, connect=connect_external(VOCAB))
        await pool.start()
        try:
            assert pool.manifest.backend == "vllm" and pool.manifest.limits.max_length == 256
            return await pool.score(random_items(3, 1, Signal.TOPK, 4))
        finally:
            await pool.close()

    assert_plain(model, random_items(3, 1, Signal.TOPK, 4), asyncio.run(run()))


@pytest.mark.parametrize("determinism", ["full", "fast"])
@pytest.mark.parametrize("flavour", ["vllm", "sglang", "echo with ids"])
def test_a_row_that_the_server_refuses_fails_alone(
    model: Path, fakes: dict[str, tuple[FakeCompletions, str]], flavour: str, determinism: str
) -> None:
    """In batches by key and by arrival. The replica stays healthy."""
    fake, url = fakes[flavour]
    items = random_items(9, 5, Signal.TOPK, 4)
    batcher: CallBatcher = BatchByKey(len(items)) if determinism == "full" else BatchByArrival()

    async def run() -> tuple[list[TeacherScores | BaseException], PoolMetrics]:
        pool = TeacherPool(
            "math", [ReplicaSpec("a", Endpoint(url))], connect=connect_external(VOCAB, model="served")
        )
        await pool.start()
        fake.refused = items[6].tokens.tolist()
        queue = CallQueue(
            "math", pool.score, 64, BatchSplit(lambda: 1, lambda item: len(item.tokens), 1 << 20)
        )

        async def one(item: ScoreItem) -> TeacherScores:
            async with batcher.member():
                scores: TeacherScores = await batcher.call(queue, item.key, item)
                return scores

        try:
            return await asyncio.gather(*map(one, items), return_exceptions=True), pool.metrics()
        finally:
            fake.refused = None
            await pool.close()

    found, metrics = asyncio.run(run())
    bad = found.pop(6)
    assert isinstance(bad, RequestRefused) and "This sequence is not served here" in str(bad)
    assert_plain(model, items[:6] + items[7:], found)  # type: ignore[arg-type]
    assert metrics.ejections == metrics.replicas[0].failures == 0


def test_the_backend_of_an_external_server_is_detected(
    server: str, fakes: dict[str, tuple[FakeCompletions, str]]
) -> None:
    connect = connect_external(VOCAB, "f")
    native = using(connect("math", "a", Endpoint(server, TOKEN)), lambda c: c.manifest())
    other = using(connect("math", "a", Endpoint(fakes["echo with ids"][1])), lambda c: c.manifest())
    assert (native.backend, other.backend) == ("native", "openai")  # type: ignore[attr-defined]
    with pytest.raises(RequestRefused, match="401"):  # a wrong token is not another kind of server
        using(connect("math", "a", Endpoint(server, "wrong")), lambda c: c.manifest())


def test_a_backend_named_in_the_recipe_is_used_without_detection(
    server: str, fakes: dict[str, tuple[FakeCompletions, str]]
) -> None:
    def manifest(backend: Backend, url: str, token: str | None = None) -> object:
        connect = connect_external(VOCAB, "f", backend=backend)
        return using(connect("math", "a", Endpoint(f"{url}/v1/", token)), lambda c: c.manifest())

    for backend, flavour in (
        (Backend.VLLM, "vllm"),
        (Backend.SGLANG, "sglang"),
        (Backend.OPENAI, "echo with ids"),
    ):
        assert manifest(backend, fakes[flavour][1]).backend == backend.value  # type: ignore[attr-defined]
    assert manifest(Backend.NATIVE, server, TOKEN).backend == "native"  # type: ignore[attr-defined]
    with pytest.raises(TeacherError, match="gives no prompt logprobs"):
        manifest(Backend.VLLM, fakes["echo with ids"][1])
    with pytest.raises(TeacherError, match="404"):
        manifest(Backend.NATIVE, fakes["vllm"][1])


def test_a_served_model_is_accepted_by_name_by_path_and_by_folder_name(
    model: Path, fakes: dict[str, tuple[FakeCompletions, str]]
) -> None:
    for name in ("served", str(model), f"/elsewhere/{model.name}"):
        found = using(completions(fakes["vllm"][1], model=name), lambda c: c.manifest())
        assert found.model == str(model)  # type: ignore[attr-defined]


def test_the_probe_finds_route_k_and_signals_of_each_server(
    fakes: dict[str, tuple[FakeCompletions, str]],
) -> None:
    expected = {
        "vllm": (Route.GENERATE, 20, [Signal.SAMPLED, Signal.TOPK]),
        "old vllm": (Route.PROMPT_LOGPROBS, 32, [Signal.SAMPLED, Signal.TOPK]),
        "sglang": (Route.RETURN_LOGPROB, 32, [Signal.SAMPLED, Signal.TOPK]),
        "echo with ids": (Route.ECHO, 5, [Signal.SAMPLED, Signal.TOPK]),
        "echo as text": (Route.ECHO, 0, [Signal.SAMPLED]),
    }
    for flavour, (route, max_k, signals) in expected.items():
        found = using(completions(fakes[flavour][1]), lambda c: c.capabilities())  # type: ignore[attr-defined]
        assert (found.route, found.max_k, found.signals) == (route, max_k, signals), flavour  # type: ignore[attr-defined]


def test_the_probe_continues_after_a_failing_route_and_fails_if_all_routes_fail(
    fakes: dict[str, tuple[FakeCompletions, str]],
) -> None:
    """SGLang without a tokenizer answers the completion API with a 500 but its own route correctly. If every route
    fails, the server may only be broken for the moment, so nothing is concluded about its capabilities."""
    for flavour in ("sglang", "no echo"):
        fake, url = fakes[flavour]
        fake.spoil = "no tokenizer"
        try:
            if flavour == "sglang":
                found = using(completions(url), lambda c: c.capabilities())
                assert found.route is Route.RETURN_LOGPROB  # type: ignore[attr-defined]
            else:
                with pytest.raises(ScoringFailed, match=r"/v1/completions failed \(500\)"):
                    using(completions(url), lambda c: c.capabilities())
        finally:
            fake.spoil = None


def test_the_probe_tries_the_k_of_the_recipe(
    fakes: dict[str, tuple[FakeCompletions, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_servers, "MAX_LOGPROBS", 13)
    asked = {0: 10, 12: 12, 14: 10}
    for k, most in asked.items():
        found = using(completions(fakes["vllm"][1], k=k), lambda c: c.capabilities())
        assert found.max_k == most, k  # type: ignore[attr-defined]


def test_an_unusable_candidate_refuses_only_its_row(
    fakes: dict[str, tuple[FakeCompletions, str]],
) -> None:
    """Such a server cannot exclude ids. The error names the row, so that only this row becomes a dead letter."""
    items = [replace(one, tokens=one.tokens % 8) for one in random_items(2, 0, Signal.TOPK, 5)]
    client = completions(fakes["vllm"][1], usable=UsableIds(8))
    with pytest.raises(RequestRefused, match=r"row 'row-0-0': the teacher's candidate \d+ is not an id"):
        using(client, lambda c: c.score(items))


def test_an_unusable_candidate_of_the_canary_row_fails_no_row(
    model: Path, fakes: dict[str, tuple[FakeCompletions, str]]
) -> None:
    """Every request carries the canary row with the row's K; its candidates are not used."""
    items, url = random_items(1, 3, Signal.TOPK, 2), fakes["vllm"][1]

    async def run() -> list[TeacherScores]:
        plain = completions(url)
        own = set((await plain.score(items))[0].ids.ravel().tolist()) | set(items[0].tokens.tolist())
        for hole in sorted(set(range(VOCAB)) - own):
            fixed = replace(probe_items(VOCAB, 256, (hole,))[0], signal=Signal.TOPK, k=2)
            if hole in (await plain.score([fixed]))[0].ids:
                break
        else:
            raise AssertionError("no id is a candidate of the canary alone")
        await plain.close()
        connect = connect_external(VOCAB, usable=UsableIds(VOCAB, (hole,)))
        pool = TeacherPool("math", [ReplicaSpec("a", Endpoint(url))], connect=connect)
        await pool.start()
        try:
            return await pool.score(items)
        finally:
            await pool.close()

    assert_plain(model, items, asyncio.run(run()))


def test_an_aligned_teacher_may_give_ids_beyond_its_tokenizer(
    model: Path, fakes: dict[str, tuple[FakeCompletions, str]]
) -> None:
    """The aligner counts them to the tail. Without alignment such a candidate is a wrong reply."""
    items = [replace(one, tokens=one.tokens % 8) for one in random_items(2, 0, Signal.TOPK, 5)]

    def few(aligned: bool) -> CompletionsClient:
        return CompletionsClient(fakes["vllm"][1], teacher="math", replica="a", vocab_size=8, aligned=aligned)

    assert_plain(model, items, using(few(True), lambda c: c.score(items)))  # type: ignore[arg-type]
    with pytest.raises(TeacherReplyError, match="outside the vocabulary of 8"):
        using(few(False), lambda c: c.score(items))


def test_a_server_without_usable_prompt_logprobs_is_refused_with_every_reason(
    fakes: dict[str, tuple[FakeCompletions, str]],
) -> None:
    text = using(completions(fakes["echo as text"][1]), lambda c: c.capabilities())  # type: ignore[attr-defined]
    assert "come as text, not as token ids" in text.missing["topk 1"]  # type: ignore[attr-defined]
    with pytest.raises(TeacherError, match="gives no prompt logprobs for token ids") as caught:
        using(completions(fakes["no echo"][1]), lambda c: c.manifest())
    message = str(caught.value)
    assert (
        "(404)" in message
        and "the answer has no prompt_logprobs" in message
        and "'echo' and 'logprobs'" in message
    )


def test_a_signal_or_k_beyond_the_servers_capabilities_is_refused(
    fakes: dict[str, tuple[FakeCompletions, str]],
) -> None:
    manifest = using(completions(fakes["vllm"][1]), lambda c: c.manifest())
    with pytest.raises(
        TeacherError, match=r"cannot give hidden; its vllm backend offers sampled, topk; and gives at most 20"
    ):
        check_signals(manifest, [Signal.HIDDEN], 64, 10)  # type: ignore[arg-type]
    with pytest.raises(RequestRefused, match=r"row 'row-0-0': cannot give at_ids"):
        using(completions(fakes["vllm"][1]), lambda c: c.score(random_items(1, 0, Signal.AT_IDS, 2)))
    with pytest.raises(RequestRefused, match=r"k = 21; this server gives sampled, topk with k ≤ 20"):
        using(completions(fakes["vllm"][1]), lambda c: c.score(random_items(1, 0, Signal.TOPK, 21)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("null", "no logprob for token"),
        ("shifted", "no logprob for token|two different logprobs"),
        ("short", "(prompt|input_token)_logprobs for"),
    ],
)
@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_corrupted_answers_of_external_servers_are_detected_with_their_row(
    flavour: str, spoil: str, message: str, fakes: dict[str, tuple[FakeCompletions, str]]
) -> None:
    fake, url = fakes[flavour]
    tokens = np.array([5, 9, 14, 22, 31, 47, 3, 11], np.int32)
    item = ScoreItem("row-s", tokens, np.arange(1, 8, dtype=np.int32), Signal.TOPK, 2)
    client = completions(url)

    async def ask(c: ScoringClient) -> object:
        await c.manifest()  # the probe gets correct answers
        fake.spoil = spoil
        return await c.score([item])

    try:
        with pytest.raises(TeacherReplyError, match=message) as caught:
            using(client, ask)
    finally:
        fake.spoil = None
    assert "teacher math, replica a, row 'row-s'" in str(caught.value)


def test_a_server_that_serves_another_model_is_refused(
    fakes: dict[str, tuple[FakeCompletions, str]],
) -> None:
    with pytest.raises(TeacherError, match="serves no model 'other'; it serves served"):
        using(completions(fakes["vllm"][1], model="other"), lambda c: c.manifest())


@pytest.mark.parametrize("flavour", ["vllm", "old vllm", "echo with ids"])
def test_a_server_without_pictures_scores_text_rows_and_refuses_rows_with_pictures(
    fakes: dict[str, tuple[FakeCompletions, str]], flavour: str, tmp_path: Path
) -> None:
    store = MediaStore(tmp_path)
    reader = reader_of(folder_of("qwen3_vl"), store)
    name = store.put(picture("red"))
    shown = np.full(reader.count(name), reader.processor.image_token_id, np.int32)
    text = random_items(1, 3, Signal.SAMPLED)[0]
    item = replace(
        text,
        tokens=np.concatenate([shown, text.tokens]),
        positions=text.positions + len(shown),
        media=(name,),
    )

    async def ask(client: ScoringClient) -> None:
        assert (await client.manifest()).pictures is None
        assert len(await client.score([text])) == 1
        with pytest.raises(RequestRefused, match="holds pictures, and this server reads text only"):
            await client.score([item])

    using(completions(fakes[flavour][1], pictures=reader), ask)
