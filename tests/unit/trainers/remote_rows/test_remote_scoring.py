"""Remote rows are scored through a worker if one can do it, and otherwise fetched by the trainer's process."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from understudy.dataplane.frame import SpillRef
from understudy.dataplane.transfer_queue.segments import WrittenRow
from understudy.errors import ClusterError, DataPlaneError, LeaseLost, TeacherError, TeacherReplyError
from understudy.rollout.workers.pool import WorkerReply, WorkersLost
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.discover import ExternalServer
from understudy.teacher.clients.http import ReplicaTimeout, RequestRefused, ScoringFailed
from understudy.teacher.manifest import Limits, Manifest, RequestBatching
from understudy.teacher.pool.integrity import Identity, check_row
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.options import PoolOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.teacher.route import TeacherRouter, score_mixture
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.references import RemoteItem, RemotePlane, RemoteRow, RemoteScores
from understudy.trainers.remote_rows.rollouts import RemoteRollouts
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.trainers.remote_rows.worker import RemoteRowHandler, _UnscoredRows
from understudy.trainers.row_columns import score_columns
from understudy.types.jagged import Jagged
from understudy.types.references import RowPlace, ScoreRef, fetched
from understudy.types.scores import ScoreItem, Signal, TeacherScores

TOKENS, VOCAB = np.arange(5, dtype=np.int32), 50
CANARY = ScoreItem("fixed tokens", np.array([1, 2, 3], np.int32), np.array([1, 2], np.int32), Signal.TOPK, 4)


class Direct:
    """A replica's client in this process. Its scores are a function of teacher and tokens."""

    def __init__(self, teacher: str = "math") -> None:
        self.teacher, self.asked = teacher, list[ScoreItem]()

    async def score(self, items: Sequence[ScoreRef], timeout: float | None = None) -> list[TeacherScores]:
        here = await fetched(items)
        self.asked += here
        return [self._scores(item) for item in here]

    def _scores(self, item: ScoreItem) -> TeacherScores:
        rng = np.random.default_rng([*self.teacher.encode(), *item.tokens.tolist()])
        logits_PV = rng.normal(0, 3, (len(item.positions), VOCAB))
        logprobs_PV = (logits_PV - np.log(np.exp(logits_PV).sum(1, keepdims=True))).astype(np.float32)
        ids = item.ids
        if item.signal is Signal.TOPK:
            ids = np.argsort(-logprobs_PV, axis=1, kind="stable")[:, : item.k].astype(np.int32)
        logprobs = None if ids is None else np.take_along_axis(logprobs_PV, ids, 1)
        return TeacherScores(item.key, self.teacher, item.signal, logprobs_PV[:, 0], ids, logprobs)


class Plane:
    uploads = SimpleNamespace(lost=None)

    async def get(self, meta: Any, names: Sequence[str]) -> dict[str, Any]:
        columns = {
            "tokens": torch.from_numpy(TOKENS),
            "loss_mask": torch.tensor([False, False, True, True, True]),
            "candidate_ids": torch.arange(6, dtype=torch.int32).reshape(3, 2),
        }
        return {name: Jagged.from_rows([columns[name] for _ in meta.keys]) for name in names}


def remote_row(rows: RemotePlane | None = None, key: str = "row_0_0", **place: Any) -> RemoteRow:
    return RemoteRow(key, 5, 3, 2, 2, RowPlace(**place), rows or RemotePlane(Plane(), "train"))


class Workers:
    def __init__(self, answer: wire.ScoreAnswer | Exception) -> None:
        self.answer = answer
        self.orders: list[wire.ScoreOrder] = []
        self.preferred: list[int | None] = []

    async def request_work(self, name: str, body: bytes, prefer: int | None = None) -> WorkerReply:
        self.orders.append(wire.decode_order(body))
        self.preferred.append(prefer)
        if isinstance(self.answer, Exception):
            raise self.answer
        return WorkerReply(wire.encode(self.answer), SimpleNamespace(number=1), 1)


def ask(
    answer: wire.ScoreAnswer | Exception,
    signal: Signal = Signal.TOPK,
    url: str = "http://10.0.0.2:1",
    **more: Any,
) -> tuple[list[Any], Direct, Workers, RemotePlane]:
    direct, workers, scoring, rows = Direct(), Workers(answer), RemoteScoring(), RemotePlane(Plane(), "train")
    scoring.open(workers, rows)  # type: ignore[arg-type]
    connect = scoring.connect(lambda *_: direct, **more)  # type: ignore[arg-type, return-value]
    client = connect("math", "0", Endpoint(url, "secret"))
    item = remote_row(rows, maker=7, mark="5f0c2a.1").to_score(signal, 4)
    return list(asyncio.run(client.score([item, CANARY], 9.0))), direct, workers, rows


STORED = wire.ScoreAnswer(
    [
        wire.ItemScores(
            "row_0_0",
            "math",
            WrittenRow({"teacher": b"x", "teacher_ids": SpillRef(3, 0, 9, 1)}, ("teacher",)),
        ),
        wire.inline_answer(
            TeacherScores("fixed tokens", "math", Signal.TOPK, np.array([-1.0, -2.0], np.float32))
        ),
    ]
)


def test_a_score_order_holds_the_rows_reference_and_prefers_the_worker_that_made_it() -> None:
    (stored, canary), direct, workers, rows = ask(STORED)
    assert isinstance(stored, RemoteScores) and stored.written == STORED.scores[0].written
    assert stored.segment.number == 1
    assert canary.sampled_logprobs.tolist() == [-1.0, -2.0]
    (order,) = workers.orders
    assert (
        order.address == wire.ReplicaAddress("math", "0", "http://10.0.0.2:1", "secret")
        and order.seconds == 9.0
    )
    assert [item.inline is None for item in order.items] == [True, False] and order.items[0].k == 4
    assert order.items[0].mark == "5f0c2a.1"
    inline = order.items[1].inline
    assert inline is not None and inline.tokens.tolist() == [1, 2, 3] and inline.positions.tolist() == [1, 2]
    assert workers.preferred == [7] and not direct.asked and rows.rows_fetched == 0


@pytest.mark.parametrize("signal", [Signal.TOPK, Signal.AT_IDS])
@pytest.mark.parametrize(
    "why",
    [
        wire.ScoreAnswer([], wire.ROWS, "the queue lacks tokens"),
        WorkersLost("died three times"),
        ClusterError("no machine"),
    ],
    ids=["rows", "deaths", "machines"],
)
def test_the_trainer_fetches_and_scores_a_row_when_no_worker_can(why: Any, signal: Signal) -> None:
    scores, direct, _, rows = ask(why, signal)
    assert [one.key for one in scores] == ["row_0_0", "fixed tokens"] and rows.rows_fetched == 1
    row = direct.asked[0]
    assert row.tokens.tolist() == TOKENS.tolist() and row.positions.tolist() == [2, 3, 4]
    assert (row.ids is None) == (signal is Signal.TOPK)
    assert direct.asked[1] is CANARY


def test_an_external_server_on_loopback_is_asked_by_the_trainers_process() -> None:
    external = ExternalServer(10, "", "m", "auto")
    _, direct, workers, _ = ask(STORED, url="http://localhost:8000", external=external)
    assert direct.asked and not workers.orders
    _, direct, workers, _ = ask(STORED, url="http://10.0.0.9:8000", external=external)
    assert not direct.asked and workers.orders[0].address.external == external


@pytest.mark.parametrize("kind", [TeacherReplyError, ReplicaTimeout, ScoringFailed, TeacherError])
def test_a_teachers_error_reaches_the_pool_from_a_worker_with_its_type(kind: type[TeacherError]) -> None:
    with pytest.raises(kind, match="so it says") as caught:
        ask(wire.ScoreAnswer([], wire.trouble_of(kind("so it says")), "so it says"))
    assert type(caught.value) is kind


def client_of(workers: Workers, teacher: str = "math") -> tuple[Any, Direct, Workers]:
    direct, scoring = Direct(teacher), RemoteScoring()
    scoring.open(workers, RemotePlane(Plane(), "train"))  # type: ignore[arg-type]
    connect = scoring.connect(lambda *_: direct)  # type: ignore[arg-type, return-value]
    return connect(teacher, "0", Endpoint("http://10.0.0.2:1")), direct, workers


def test_a_request_with_a_local_row_is_sent_by_the_trainers_process() -> None:
    """A worker's answer would come back without candidates."""
    client, direct, workers = client_of(Workers(STORED))
    here = ScoreItem("row_1_0", TOKENS, np.array([3], np.int32), Signal.TOPK, 4)
    asyncio.run(client.score([remote_row().to_score(Signal.TOPK, 4), here, CANARY]))
    assert [item.key for item in direct.asked] == [
        "row_0_0",
        "row_1_0",
        "fixed tokens",
    ] and not workers.orders
    assert direct.asked[0].tokens.tolist() == TOKENS.tolist() and direct.asked[1] is here


def test_a_concurrent_second_request_for_a_row_does_not_prefer_the_worker_that_made_it() -> None:
    """The preferred worker may be the slow one. The two answers have different marks."""
    answers = [
        wire.ScoreAnswer([wire.ItemScores("row_0_0", "math", WrittenRow({}, ("teacher",), mark))])
        for mark in ("5f0c2a.2", "77aa01.1")
    ]

    class Slow(Workers):
        async def request_work(self, name: str, body: bytes, prefer: int | None = None) -> WorkerReply:
            turn = len(self.preferred)
            self.preferred.append(prefer)
            await asyncio.sleep(0.02 * turn)
            return WorkerReply(wire.encode(answers[turn % 2]), SimpleNamespace(number=turn), turn)

    async def body() -> None:
        client, _, workers = client_of(Slow(STORED))
        item = remote_row(maker=7).to_score(Signal.TOPK, 4)
        first, second = [asyncio.create_task(client.score([item])) for _ in range(2)]
        done, late = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        assert done == {first} and [task.cancel() for task in late] == [True]
        (kept,) = first.result()
        assert isinstance(kept, RemoteScores) and kept.written.mark == "5f0c2a.2"
        await asyncio.wait(late)
        await client.score([item])
        assert workers.preferred == [7, None, 7], (
            "once both requests have ended the maker must be preferred again"
        )

    asyncio.run(body())


@pytest.mark.parametrize(("signal", "k"), [(Signal.TOPK, 4), (Signal.AT_IDS, 0), (Signal.SAMPLED, 0)])
def test_mixture_scores_of_a_remote_row_equal_those_of_the_local_row(signal: Signal, k: int) -> None:
    """The row is fetched by this process, which then asks every teacher."""
    weights = {"add": 1, "sort": 2, "swap": 1}
    stored = wire.ScoreAnswer(STORED.scores[:1])
    clients = {name: client_of(Workers(stored), name) for name in weights}
    router = TeacherRouter(
        {name: Pool(client) for name, (client, _, _) in clients.items()}, {n: n for n in weights}
    )  # type: ignore[arg-type]
    item = remote_row().to_score(signal, k)

    async def body() -> None:
        mixed = await (await score_mixture(router, item, weights)).fetch()
        local = await (await score_mixture(router, await item.fetch(), weights)).fetch()
        for name, value in score_columns(local).items():
            assert np.array_equal(score_columns(mixed)[name], value), name
        assert item.rows.rows_fetched == 2
        assert not any(workers.orders for _, _, workers in clients.values())
        alone = await score_mixture(router, item, {"add": 1, "sort": 0})
        assert isinstance(alone, RemoteScores), (
            "a mixture with one positive weight must be an ordinary request"
        )

    asyncio.run(body())


class Pool:
    def __init__(self, client: Any) -> None:
        self.score = client.score


@pytest.mark.parametrize("batching", list(RequestBatching))
def test_a_pool_with_a_cache_fetches_remote_rows_and_caches_their_scores(
    batching: RequestBatching,
) -> None:
    async def body() -> None:
        client, direct, workers = client_of(Workers(STORED))
        pool = TeacherPool("math", [ReplicaSpec("0")], options=PoolOptions(cache_bytes=10**6, canary=False))
        manifest = Manifest(
            "math", "native", "m", "aa", "v", VOCAB, 8, "float32", list(Signal), Limits(), batching
        )
        pool._supervisor.identity = Identity(manifest, np.zeros(1))
        pool._ask = client.score  # type: ignore[method-assign]
        first, second = (remote_row(key=f"row_{number}_0").to_score(Signal.TOPK, 4) for number in range(2))
        (asked,) = await pool.score([first])
        (found,) = await pool.score([second])
        assert isinstance(asked, TeacherScores) and isinstance(found, TeacherScores)
        assert found.key == "row_1_0" and np.array_equal(asked.logprobs, found.logprobs)
        assert len(direct.asked) == 1 and not workers.orders and pool.metrics().cache_hits == 1

    asyncio.run(body())


def test_a_row_removed_from_the_ledger_can_still_be_fetched_by_its_location() -> None:
    """As in a local run, a mixture's row is scored although a failed sibling has removed its group."""
    mask = np.array([False, False, True, True, True])
    cells = {"tokens": TOKENS, "loss_mask": mask, "behaviour_logprobs": np.zeros(5, np.float32)}
    read: list[set[str]] = []

    class Ledger(Plane):
        async def get(self, meta: Any, names: Sequence[str]) -> dict[str, Any]:
            raise DataPlaneError("no such row in flight")

        async def cells(self, asked: WrittenRow) -> dict[str, Any]:
            read.append(set(asked.cells))
            return {name: cells[name] for name in asked.cells}

    written = WrittenRow(dict.fromkeys(cells, SpillRef(3, 0, 9, 1)), mark="5f0c2a.1")
    row = replace(remote_row(RemotePlane(Ledger(), "train")), written=written)
    found = asyncio.run(row.to_score(Signal.TOPK, 4).fetch())
    assert found.tokens.tolist() == TOKENS.tolist() and found.positions.tolist() == [2, 3, 4]
    assert read == [{"tokens", "loss_mask"}], "only the columns of the request must be read"


@pytest.mark.parametrize("place", ["location", "ledger"])
@pytest.mark.parametrize("media", [("aa", "bb"), ()])
def test_a_remote_row_is_fetched_with_its_pictures(place: str, media: tuple[str, ...]) -> None:
    """The trainer's process asks with the whole row for a teacher with a cache, a mixture, or when workers are lost."""
    columns = {
        "tokens": TOKENS,
        "loss_mask": np.array([False, False, True, True, True]),
        "media": list(media),
    }

    class Ledger(Plane):
        async def get(self, meta: Any, names: Sequence[str]) -> dict[str, Any]:
            return {name: [columns[name]] for name in names}

        async def cells(self, asked: WrittenRow) -> dict[str, Any]:
            return {name: columns[name] for name in asked.cells}

    written = WrittenRow(dict.fromkeys(columns, SpillRef(3, 0, 9, 1))) if place == "location" else None
    row = replace(remote_row(RemotePlane(Ledger(), "train", pictures=True)), written=written)
    found = asyncio.run(row.to_score(Signal.TOPK, 4).fetch())
    assert found.media == media and found.tokens.tolist() == TOKENS.tolist()


def test_a_stored_row_of_an_earlier_launch_is_handed_over_with_its_pictures() -> None:
    handed: list[tuple[str, ...]] = []

    class Ledger(Plane):
        async def get(self, meta: Any, names: Sequence[str]) -> dict[str, Any]:
            return (
                {"sizes": [{"tokens": 5, "loss": 3}]} if "sizes" in names else await super().get(meta, names)
            )

        async def hand_over(self, meta: Any, names: Sequence[str]) -> Any:
            handed.append(tuple(names))
            return SimpleNamespace(marks={"tokens": ("5f0c2a.1",)})

    rows = RemotePlane(Ledger(), "train", pictures=True)
    rollouts = RemoteRollouts(None, rows, None, None, with_candidates=True)  # type: ignore[arg-type]
    row = asyncio.run(rollouts.stored("row_0_0"))
    assert handed == [("tokens", "loss_mask", "candidate_ids", "media")]
    assert (row.length, row.first, row.candidates, row.place.mark) == (5, 2, 2, "5f0c2a.1")


def test_remote_scores_are_fetched_and_recorded_by_their_location() -> None:
    written = WrittenRow({"teacher": b"x"}, ("teacher",), "5f0c2a.1")
    adopted: list[Any] = []

    class Ledger(Plane):
        async def cells(self, asked: WrittenRow) -> dict[str, Any]:
            assert asked is written
            return {"teacher_logprobs": np.array([-1.0], np.float32), "teacher": "math"}

        async def adopt(self, partition: str, rows: Any) -> None:
            adopted.append((partition, rows))
            if len(adopted) == 2:
                raise LeaseLost("its group is gone")

    async def put(arrays: TeacherScores) -> None:
        raise AssertionError("remote scores must not be recorded as arrays")

    async def body() -> None:
        scores = RemoteScores(
            "row_0_0", "math", Signal.SAMPLED, written, None, RemotePlane(Ledger(), "train")
        )
        found = await scores.fetch()
        assert found.sampled_logprobs.tolist() == [-1.0] and found.ids is None
        await scores.record(put)
        await scores.record(put)
        assert adopted[0] == ("train", {"row_0_0": written})

    asyncio.run(body())


def test_a_remote_row_that_is_too_long_is_refused_without_fetching_it() -> None:
    limits = msgspec.structs.replace(Limits(), max_length=4)
    manifest = Manifest("math", "native", "m", "aa", "v", VOCAB, 8, "float32", list(Signal), limits)
    item: RemoteItem = remote_row().to_score(Signal.TOPK, 4)
    with pytest.raises(RequestRefused, match="has 5 tokens; a sequence may have 4"):
        check_row(manifest, item)
    assert item.rows.rows_fetched == 0


OWN_PROMPT = np.array([9, 8, 7, 6], np.int32)


def test_a_score_order_carries_the_teachers_own_prompt_and_the_worker_appends_the_row() -> None:
    client, direct, workers = client_of(Workers(wire.ScoreAnswer(STORED.scores)))
    item = remote_row(maker=7).to_score(Signal.AT_IDS, 0).after(OWN_PROMPT)
    assert item.length == 7, "the length must include the teacher's own prompt"
    asyncio.run(client.score([item, CANARY]))
    (order,) = workers.orders
    assert not direct.asked and order.items[1].prompt is None
    handler = RemoteRowHandler.__new__(RemoteRowHandler)
    handler._unscored, handler._partition, handler._media = _UnscoredRows(), "train", None
    handler._writer = Reader()
    row, canary = asyncio.run(handler._items(order.items))
    assert row.tokens.tolist() == [9, 8, 7, 6, 2, 3, 4] and row.positions.tolist() == [4, 5, 6]
    assert row.ids is not None and row.ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert canary.tokens.tolist() == CANARY.tokens.tolist()
    fetched_here = asyncio.run(item.fetch())
    assert fetched_here.tokens.tolist() == row.tokens.tolist()
    assert fetched_here.positions.tolist() == row.positions.tolist()


class Reader:
    """A worker's view of the queue."""

    async def read(self, partition: str, keys: Sequence[str], names: Sequence[str], marks: Any) -> Any:
        columns = await Plane().get(SimpleNamespace(keys=keys), names)
        return {name: [row.numpy() for row in column] for name, column in columns.items()}


def test_the_length_check_of_a_remote_row_includes_the_teachers_own_prompt() -> None:
    limits = msgspec.structs.replace(Limits(), max_length=6)
    manifest = Manifest("math", "native", "m", "aa", "v", VOCAB, 8, "float32", list(Signal), limits)
    item = remote_row().to_score(Signal.TOPK, 4)
    check_row(manifest, item)
    with pytest.raises(RequestRefused, match="has 7 tokens; a sequence may have 6"):
        check_row(manifest, item.after(OWN_PROMPT))


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:1", True),
        ("http://[::1]:1", True),
        ("http://localhost:1/v1", True),
        ("http://10.0.0.1:1", False),
        ("https://teacher.example", False),
    ],
)
def test_on_loopback_recognizes_loopback_addresses(url: str, loopback: bool) -> None:
    assert Endpoint(url).on_loopback is loopback
