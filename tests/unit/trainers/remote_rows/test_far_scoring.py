"""Rows judged by name: through a worker where one can, by the trainer's process where none can, and never as blanks."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from understudy.dataplane.frame import SpillRef
from understudy.dataplane.transfer_queue.segments import Written
from understudy.errors import ClusterError, TeacherError, TeacherReplyError
from understudy.rollout.workers.pool import Answer, WorkersLost
from understudy.teacher.clients.http import ReplicaTimeout, ServerFailed
from understudy.teacher.pool.launch import Endpoint
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.rollouts import FarRow, RowWorkers
from understudy.trainers.remote_rows.scoring import FarScoreItem, FarScores, FarScoring, is_loopback
from understudy.types.jagged import Jagged
from understudy.types.scores import ScoreItem, Signal, TeacherScores

TOKENS = np.arange(5, dtype=np.int32)
CANARY = ScoreItem("fixed tokens", np.array([1, 2, 3], np.int32), np.array([1, 2], np.int32), Signal.TOPK, 4)


class Near:
    """A replica as this process sees it."""

    def __init__(self) -> None:
        self.asked: list[ScoreItem] = []

    async def score(self, items: Sequence[ScoreItem], timeout: float | None = None) -> list[TeacherScores]:
        self.asked += items
        return [TeacherScores(i.key, "math", i.signal, np.zeros(len(i.positions), np.float32)) for i in items]


class Plane:
    shelf = SimpleNamespace(lost=None)

    async def get(self, meta: Any, names: Sequence[str]) -> dict[str, Any]:
        columns = {
            "tokens": torch.from_numpy(TOKENS),
            "loss_mask": torch.tensor([False, False, True, True, True]),
            "candidate_ids": torch.arange(6, dtype=torch.int32).reshape(3, 2),
        }
        return {name: Jagged.from_rows([columns[name] for _ in meta.keys]) for name in names}


class Workers:
    def __init__(self, answer: wire.ScoreAnswer | Exception) -> None:
        self.answer = answer
        self.orders: list[wire.ScoreOrder] = []
        self.preferred: list[int | None] = []

    async def errand(self, name: str, body: bytes, prefer: int | None = None) -> Answer:
        self.orders.append(wire.decode_order(body))
        self.preferred.append(prefer)
        if isinstance(self.answer, Exception):
            raise self.answer
        return Answer(wire.encode(self.answer), SimpleNamespace(number=1), 1)


def ask(
    answer: wire.ScoreAnswer | Exception,
    signal: Signal = Signal.TOPK,
    url: str = "http://10.0.0.2:1",
    **more: Any,
) -> tuple[list[TeacherScores], Near, Workers, FarScoring]:
    near, workers, scoring = Near(), Workers(answer), FarScoring()
    scoring.open(RowWorkers(workers, Plane(), "train"))  # type: ignore[arg-type]
    connect = scoring.connect(lambda *_: near, **more)  # type: ignore[arg-type, return-value]
    client = connect("math", "0", Endpoint(url, "secret"))
    item = FarScoreItem.of(FarRow("row_0_0", 5, 3, 2, maker=7, mark="5f0c2a.1"), signal, 4)
    return asyncio.run(client.score([item, CANARY], 9.0)), near, workers, scoring


VERDICTS = wire.ScoreAnswer(
    [
        wire.Verdict(
            "row_0_0", "math", Written({"teacher": b"x", "teacher_ids": SpillRef(3, 0, 9, 1)}, ("teacher",))
        ),
        wire.Verdict("fixed tokens", "math", logprobs=np.array([-1.0, -2.0], "<f4").tobytes()),
    ]
)


def test_a_worker_is_told_names_and_the_fixed_tokens_and_prefers_who_has_the_row() -> None:
    (far, canary), near, workers, scoring = ask(VERDICTS)
    assert (
        isinstance(far, FarScores) and far.written == VERDICTS.verdicts[0].written and far.ticket.number == 1
    )
    assert canary.sampled_logprobs.tolist() == [-1.0, -2.0] and not isinstance(canary, FarScores)
    (order,) = workers.orders
    assert order.door == wire.Door("math", "0", "http://10.0.0.2:1", "secret") and order.seconds == 9.0
    assert [item.inline is None for item in order.items] == [True, False] and order.items[0].k == 4
    assert order.items[0].mark == "5f0c2a.1" and order.remember_bytes == 0
    told = wire.from_inline(order.items[1], order.items[1].inline)  # type: ignore[arg-type]
    assert told.tokens.tolist() == [1, 2, 3] and told.positions.tolist() == [1, 2]
    assert workers.preferred == [7] and not near.asked and scoring.rows_judged_here == 0


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
def test_where_no_worker_can_the_tokens_are_read_here(why: Any, signal: Signal) -> None:
    scores, near, _, scoring = ask(why, signal)
    assert [one.key for one in scores] == ["row_0_0", "fixed tokens"] and scoring.rows_judged_here == 1
    row = near.asked[0]
    assert row.tokens.tolist() == TOKENS.tolist() and row.positions.tolist() == [2, 3, 4]
    assert (row.ids is None) == (signal is Signal.TOPK)
    assert near.asked[1] is CANARY


def test_an_external_server_on_this_machines_loopback_is_asked_from_here() -> None:
    external = wire.External(10, "", "m", "auto")
    _, near, workers, _ = ask(VERDICTS, url="http://localhost:8000", external=external)
    assert near.asked and not workers.orders
    _, near, workers, _ = ask(VERDICTS, url="http://10.0.0.9:8000", external=external)
    assert not near.asked and workers.orders[0].door.external == external


@pytest.mark.parametrize("kind", [TeacherReplyError, ReplicaTimeout, ServerFailed, TeacherError])
def test_a_teachers_failure_reaches_the_pool_as_what_it_was(kind: type[TeacherError]) -> None:
    with pytest.raises(kind, match="so it says") as caught:
        ask(wire.ScoreAnswer([], wire.trouble_of(kind("so it says")), "so it says"))
    assert type(caught.value) is kind


def test_a_row_that_is_here_keeps_its_request_here() -> None:
    """Its answer would come back through a worker without candidates."""
    near, workers, scoring = Near(), Workers(VERDICTS), FarScoring()
    scoring.open(RowWorkers(workers, Plane(), "train"))  # type: ignore[arg-type]
    client = scoring.connect(lambda *_: near)("math", "0", Endpoint("http://10.0.0.2:1"))  # type: ignore[arg-type, return-value]
    far = FarScoreItem.of(FarRow("row_0_0", 5, 3, 2), Signal.TOPK, 4)
    here = ScoreItem("row_1_0", TOKENS, np.array([3], np.int32), Signal.TOPK, 4)
    asyncio.run(client.score([far, here, CANARY]))
    assert [item.key for item in near.asked] == ["row_0_0", "row_1_0", "fixed tokens"] and not workers.orders
    assert near.asked[0].tokens.tolist() == TOKENS.tolist() and near.asked[1] is here


def test_a_second_request_about_a_row_goes_to_anybody() -> None:
    """Perhaps it is the row's own worker that is slow; and of the two answers each has a name of its own."""
    verdicts = [
        wire.ScoreAnswer([wire.Verdict("row_0_0", "math", Written({}, ("teacher",), mark))])
        for mark in ("5f0c2a.2", "77aa01.1")
    ]

    class Slow(Workers):
        async def errand(self, name: str, body: bytes, prefer: int | None = None) -> Answer:
            turn = len(self.preferred)
            self.preferred.append(prefer)
            await asyncio.sleep(0.02 * turn)
            return Answer(wire.encode(verdicts[turn % 2]), SimpleNamespace(number=turn), turn)

    async def body() -> None:
        near, workers, scoring = Near(), Slow(VERDICTS), FarScoring()
        scoring.open(RowWorkers(workers, Plane(), "train"))  # type: ignore[arg-type]
        client = scoring.connect(lambda *_: near)("math", "0", Endpoint("http://10.0.0.2:1"))  # type: ignore[arg-type, return-value]
        item = FarScoreItem.of(FarRow("row_0_0", 5, 3, 2, maker=7), Signal.TOPK, 4)
        first, second = [asyncio.create_task(client.score([item])) for _ in range(2)]
        done, late = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        assert done == {first} and [task.cancel() for task in late] == [True]
        (kept,) = first.result()
        assert isinstance(kept, FarScores) and kept.written.mark == "5f0c2a.2"
        await asyncio.wait(late)
        await client.score([item])
        assert workers.preferred == [7, None, 7], "none of them is under way any more"

    asyncio.run(body())


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
def test_loopback(url: str, loopback: bool) -> None:
    assert is_loopback(url) is loopback
