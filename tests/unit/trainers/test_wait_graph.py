"""The wait graph: chains from a waiting task to what it waits for."""

import asyncio

from understudy.observability.spans import Spans
from understudy.run.vitals import teacher_state
from understudy.teacher.pool.health import State
from understudy.teacher.pool.metrics import PoolMetrics, ReplicaMetrics
from understudy.trainers.wait_graph import PRODUCER, wait_graph

TEACHERS = {"teacher math": "12 requests under way; replica 0 healthy, 12 requests", "teacher code": "idle"}


async def waiting_run() -> list[str]:
    """Window 3 is trained next; its samples wait for a teacher and the engine. Window 4 is produced as well."""
    spans, done = Spans(None), asyncio.Event()

    async def sample(name: str, **about: str) -> None:
        with spans.span(name, **about):
            await done.wait()

    async def producer(window: int, *samples: tuple[str, dict[str, str]]) -> None:
        with spans.span(PRODUCER, window=window):
            await asyncio.gather(*(sample(name, **about) for name, about in samples))

    async def train() -> None:
        with spans.span("wait for rows", step=4, window=3):
            await done.wait()

    async def admit() -> None:
        with spans.span("wait for a slot"):
            await done.wait()

    score = ("score", {"key": "a_0_0", "teacher": "math"})
    tasks = [
        asyncio.create_task(one)
        for one in (
            train(),
            admit(),
            producer(3, score, ("score", {"key": "b_0_0", "teacher": "math"}), ("rollout", {"key": "c_0_0"})),
            producer(4, ("reward", {"key": "d_0_0"})),
        )
    ]
    await asyncio.sleep(0.01)
    lines = wait_graph(spans.under_way(), spans.under_way()[0].start + 12, TEACHERS)
    done.set()
    await asyncio.gather(*tasks)
    assert spans.under_way() == []
    return lines


def test_the_wait_graph_leads_from_the_trainer_to_the_replica_it_waits_for() -> None:
    lines = asyncio.run(waiting_run())
    train = [line for line in lines if line.startswith("train")]
    assert train[0] == (
        "train waits for rows of window 3 (12 s) <- produce window 3 waits for 2 × scores of teacher math "
        "(oldest a_0_0, 12 s) <- teacher math: 12 requests under way; replica 0 healthy, 12 requests"
    )
    assert train[1].endswith(
        "<- produce window 3 waits for 1 × rollout by the engine and its agent loop (oldest c_0_0, 12 s)"
    )
    assert len(train) == 2 and not any("window 4" in line or "code" in line for line in lines), (
        "nothing waits for window 4"
    )
    assert all(
        line.startswith("admission waits for a slot, which a publish frees (12 s) <- train waits for rows")
        for line in lines
        if line not in train
    )


def test_the_wait_graph_of_the_sync_trainer_and_of_an_evaluation() -> None:
    spans = Spans(None)
    with spans.span("produce", step=2), spans.span("reward", key="a_0_0"):
        now = spans.under_way()[0].start + 3
        assert wait_graph(spans.under_way(), now, {}) == [
            "train waits for rows of step 2 (3 s) <- produce step 2 waits for 1 × the reward function (oldest a_0_0, 3 s)"
        ]
    with spans.span("evaluate", step=2):
        now = spans.under_way()[0].start + 1
        assert wait_graph(spans.under_way(), now, {}) == [
            "evaluation waits for answers and their rewards (1 s)"
        ]


def test_teacher_state_uses_singular_and_plural_for_requests() -> None:
    def replica(name: str, waiting: int) -> ReplicaMetrics:
        return ReplicaMetrics(name, State.HEALTHY, 0.5, 0, 0, 0, 0, 0, 0, waiting, 0.0, 0.0)

    pool = PoolMetrics(
        "math", False, 0, 0, 0, 0, 0, 0, 0, 0.0, 1, replicas=[replica("0", 1), replica("1", 0)]
    )
    assert (
        teacher_state(pool)
        == "1 request under way; replica 0 healthy, 1 request; replica 1 healthy, 0 requests"
    )
