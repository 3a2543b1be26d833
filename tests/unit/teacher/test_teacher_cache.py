"""The score cache and hedged requests of a teacher pool: neither may change a score."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from teacher_rig import random_items
from test_teacher_pool import MANIFEST, OPTIONS, Rig, Scripted, answer, failing, run_with_pool, settle

from understudy.errors import TeacherReplyError
from understudy.teacher.manifest import RequestBatching
from understudy.teacher.pool.cache import ScoreCache, item_digest
from understudy.teacher.pool.events import EventKind
from understudy.types.scores import ScoreItem, Signal, TeacherScores

BY_ARRIVAL = msgspec.structs.replace(MANIFEST, batching=RequestBatching.BY_ARRIVAL)


def test_the_cache_key_depends_on_everything_that_changes_scores_but_not_on_the_row_key() -> None:
    item = random_items(1, 1, Signal.TOPK, 4)[0]
    same = replace(item, key="another row")
    assert item_digest(MANIFEST, item) == item_digest(MANIFEST, same)
    others = [
        replace(item, k=5),
        replace(item, signal=Signal.SAMPLED),
        replace(item, positions=item.positions[:-1]),
        replace(item, tokens=item.tokens[::-1].copy()),
        replace(item, ids=np.zeros((1, 1), np.int32)),
    ]
    digests = {item_digest(MANIFEST, other) for other in others} | {item_digest(MANIFEST, item)}
    assert len(digests) == 6
    assert item_digest(msgspec.structs.replace(MANIFEST, weights_sha256="bb"), item) not in digests


def test_the_oldest_entries_are_evicted_when_the_cache_is_full() -> None:
    cache = ScoreCache(max_bytes=4000)
    for seed in range(40):
        items = random_items(1, seed)
        cache.put(bytes([seed]), answer("math", items))
        assert cache.held_bytes <= 4000
    assert cache.get(bytes([39]), random_items(1, 39)) is not None
    assert cache.get(bytes([0]), random_items(1, 0)) is None


def test_a_repeated_request_is_answered_from_the_cache() -> None:
    async def test(rig: Rig) -> None:
        items = random_items(3, 1)
        first = await rig.pool.score(items)
        again = await rig.pool.score([replace(item, key=f"again-{item.key}") for item in items])
        assert [s.key for s in again] == [f"again-{item.key}" for item in items]
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a.sampled_logprobs, b.sampled_logprobs)
        assert sum(len(r.asked) for r in rig.replicas.values()) == 1 and rig.pool.metrics().cache_hits == 3

    run_with_pool(test, Rig(options=replace(OPTIONS, cache_bytes=10**6)))


def test_a_request_scored_by_itself_is_never_partly_answered_from_the_cache() -> None:
    """Leaving out cached items would change the batch, and with it the last bits of the other scores."""

    async def test(rig: Rig) -> None:
        await rig.pool.score(random_items(3, 1))
        await rig.pool.score(random_items(3, 1)[:2])
        assert [len(keys) for r in rig.replicas.values() for keys in r.asked] == [3, 2]

    run_with_pool(test, Rig(options=replace(OPTIONS, cache_bytes=10**6)))


def test_cached_items_of_a_request_are_answered_singly_when_replicas_batch_by_arrival() -> None:
    async def test(rig: Rig) -> None:
        known, new = random_items(2, 1), random_items(2, 2)
        await rig.pool.score(known)
        scores = await rig.pool.score([known[0], new[0], known[1], new[1]])
        assert [s.key for s in scores] == [known[0].key, new[0].key, known[1].key, new[1].key]
        asked = [keys for r in rig.replicas.values() for keys in r.asked]
        assert sorted(asked) == sorted([[known[0].key, known[1].key], [new[0].key, new[1].key]])

    def merging(name: str) -> Scripted:
        replica = Scripted(name)
        replica.manifest_now = BY_ARRIVAL
        return replica

    rig = Rig(options=replace(OPTIONS, cache_bytes=10**6))
    rig.fresh = merging
    run_with_pool(test, rig)


async def never(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
    await asyncio.Event().wait()
    return []


HEDGING = replace(OPTIONS, hedge_factor=2.0)


async def record_answers(rig: Rig, seconds: float = 1.0) -> None:
    """Gives the pool enough answers, each taking `seconds`, to derive its hedging delay."""

    async def taking_time(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
        await rig.clock.sleep(seconds)
        return answer(replica.name, items)

    for replica in rig.replicas.values():
        replica.behaviour = taking_time
    for _ in range(20):
        await rig.score()


def test_a_request_that_takes_too_long_is_hedged_to_another_replica() -> None:
    async def test(rig: Rig) -> None:
        await record_answers(rig)
        lighter = min(rig.pool.metrics().replicas, key=lambda r: r.tokens).name
        rig.replicas[lighter].behaviour = never
        call = asyncio.create_task(rig.pool.score(random_items(1)))
        await rig.clock.advance(1.9)
        assert rig.pool.metrics().hedges == 0
        await rig.clock.advance(1.5)
        assert call.done() and call.result()[0].teacher != lighter
        metrics = rig.pool.metrics()
        assert metrics.hedges == 1 and metrics.retries == 0
        assert all(r.outstanding_tokens == 0 and r.failures == 0 for r in metrics.replicas)

    run_with_pool(test, Rig(options=HEDGING))


def test_hedge_after_hedges_a_request_after_a_fixed_delay_without_earlier_answers() -> None:
    async def test(rig: Rig) -> None:
        rig.replicas["a"].behaviour = never
        rig.replicas["b"].behaviour = answered
        calls = [asyncio.create_task(rig.pool.score(random_items(1, seed))) for seed in range(2)]
        await rig.clock.advance(2.9)
        assert sum(call.done() for call in calls) == 1 and rig.pool.metrics().hedges == 0
        await rig.clock.advance(0.2)
        assert {call.result()[0].teacher for call in calls} == {"b"}
        assert rig.pool.metrics().hedges == 1 and rig.pool.metrics().retries == 0

    run_with_pool(test, Rig(options=replace(OPTIONS, hedge_after=3.0)))


def test_a_request_answered_in_the_usual_time_is_not_hedged() -> None:
    async def test(rig: Rig) -> None:
        await record_answers(rig)
        for _ in range(5):
            await rig.score()
        assert rig.pool.metrics().hedges == 0

    run_with_pool(test, Rig(options=HEDGING))


def test_a_request_is_retried_when_both_of_its_hedged_replicas_fail() -> None:
    async def test(rig: Rig) -> None:
        await record_answers(rig)
        lighter = min(rig.pool.metrics().replicas, key=lambda r: r.tokens).name
        other = "b" if lighter == "a" else "a"

        async def late_bad_reply(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
            await rig.clock.sleep(5.0)
            raise TeacherReplyError("late and wrong")

        rig.replicas[lighter].behaviour = late_bad_reply
        rig.replicas[other].behaviour = failing(TeacherReplyError("wrong"))
        call = asyncio.create_task(rig.pool.score(random_items(1)))
        await rig.clock.advance(5.5)
        await settle()
        assert {e.replica for e in rig.events_of(EventKind.RETRIED)} == {"a", "b"}
        for replica in rig.replicas.values():
            replica.behaviour = answered
        await rig.clock.advance(5.0)
        assert (await call)[0].key == "row-0-0"

    run_with_pool(test, Rig(options=HEDGING))


def test_a_hedged_request_succeeds_although_its_other_replica_uses_up_max_bad_attempts() -> None:
    async def test(rig: Rig) -> None:
        order = itertools.count()

        async def late_or_wrong(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
            if next(order):
                raise TeacherReplyError("wrong")
            await rig.clock.sleep(5.0)
            return answer(replica.name, items)

        for replica in rig.replicas.values():
            replica.behaviour = late_or_wrong
        call = asyncio.create_task(rig.pool.score(random_items(1)))
        await rig.clock.advance(6.0)
        assert (await call)[0].key == "row-0-0"
        assert sum(r.failures for r in rig.pool.metrics().replicas) == 1

    run_with_pool(test, Rig(options=replace(OPTIONS, hedge_after=1.0, max_bad_attempts=1)))


async def answered(replica: Scripted, items: Sequence[ScoreItem]) -> list[TeacherScores]:
    return answer(replica.name, items)
