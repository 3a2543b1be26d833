"""Batches by key do not depend on the timing of calls; batches by arrival do not wait for other callers."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from understudy.errors import EngineError, TeacherError, TeacherUnavailable
from understudy.trainers.call_batching import BatchByArrival, BatchByKey, BatchSplit, CallQueue


async def run_members(seed: int, turns: dict[str, int], limit: int = 3) -> list[tuple[str, ...]]:
    """Members ask `turns[key]` times in a row, with random pauses; returns the batches as they were composed."""
    rng = random.Random(seed)
    batches: list[tuple[str, ...]] = []

    async def serve(items: Sequence[str]) -> list[str]:
        batches.append(tuple(items))
        await asyncio.sleep(rng.random() * 0.003)
        return [item.upper() for item in items]

    queue, by_key = CallQueue("engine", serve, limit), BatchByKey(len(turns))

    async def member(key: str) -> None:
        async with by_key.member():
            for turn in range(turns[key]):
                await asyncio.sleep(rng.random() * 0.003)
                assert await by_key.call(queue, key, f"{key}{turn}") == f"{key}{turn}".upper()

    keys = list(turns)
    rng.shuffle(keys)
    await asyncio.wait_for(asyncio.gather(*(member(key) for key in keys)), 5)
    return sorted(batches)


def test_batches_by_key_do_not_depend_on_the_timing_of_calls() -> None:
    turns = {"a": 1, "b": 3, "c": 2, "d": 0, "e": 3, "f": 1, "g": 2}
    composed = {tuple(asyncio.run(run_members(seed, turns))) for seed in range(8)}
    assert len(composed) == 1
    first = composed.pop()
    assert ("a0", "b0", "c0") in first and ("e0", "f0", "g0") in first and ("b2", "e2") in first


def ask_by_key(queue: CallQueue, numbers: Sequence[int]) -> list[Any]:
    """The results of members that make one call each, batched by key."""

    async def scenario() -> list[Any]:
        by_key = BatchByKey(len(numbers))

        async def member(number: int) -> Any:
            async with by_key.member():
                return await by_key.call(queue, f"{number:03d}", number)

        return await asyncio.wait_for(
            asyncio.gather(*(member(i) for i in numbers), return_exceptions=True), 5
        )

    return asyncio.run(scenario())


@pytest.mark.parametrize("bad", [{5}, {0, 7}, set(range(8)), {2, 3, 4}])
def test_only_the_bad_calls_of_a_batch_by_key_fail_each_with_its_own_error(bad: set[int]) -> None:
    batches: list[list[int]] = []

    async def serve(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        if refused := bad & set(items):
            raise TeacherError(f"{min(refused)} is too long")
        return [10 * item for item in items]

    queue = CallQueue("score/t", serve, 8)
    found = ask_by_key(queue, range(8))
    for number in range(8):
        if number in bad:
            assert str(found[number]) == f"{number} is too long"
        else:
            assert found[number] == 10 * number
    first, batches = batches, []
    ask_by_key(queue, [7, 3, 5, 1, 0, 2, 4, 6])
    assert batches == first, "batches must not depend on the order of the calls"


def test_a_call_refused_by_the_queues_check_joins_no_batch() -> None:
    batches: list[list[int]] = []

    async def serve(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        return list(items)

    def check(item: int) -> None:
        if item == 2:
            raise TeacherError("2 is too long")

    found = ask_by_key(CallQueue("score/t", serve, 8, check=check), range(4))
    assert found[:2] == [0, 1] and str(found[2]) == "2 is too long" and found[3] == 3
    assert batches == [[0, 1, 3]]


@pytest.mark.parametrize(
    "error", [TeacherUnavailable("gone"), EngineError("broken"), RuntimeError("CUDA out of memory")]
)
def test_an_error_that_no_single_call_causes_fails_the_whole_batch_without_a_retry(error: Exception) -> None:
    asked: list[int] = []

    async def serve(items: Sequence[int]) -> list[int]:
        asked.append(len(items))
        if 1 in items:
            raise error
        return list(items)

    found = ask_by_key(CallQueue("engine", serve, 2), range(4))
    assert found == [error, error, 2, 3] and asked == [2, 2]


def test_a_member_that_fails_between_calls_does_not_block_the_other_members() -> None:
    async def scenario() -> list[object]:
        async def serve(items: Sequence[int]) -> list[int]:
            return list(items)

        queue, by_key = CallQueue("engine", serve, 8), BatchByKey(3)

        async def member(number: int) -> int:
            async with by_key.member():
                await by_key.call(queue, str(number), number)
                if number == 1:
                    raise RuntimeError("reward raised")
                await asyncio.sleep(0.001 * number)
                result: int = await by_key.call(queue, str(number), number)
                return result

        return await asyncio.wait_for(
            asyncio.gather(*(member(i) for i in range(3)), return_exceptions=True), 2
        )

    results = asyncio.run(scenario())
    assert results[0] == 0 and isinstance(results[1], RuntimeError) and results[2] == 2


@pytest.mark.parametrize("slow", [0.0, 0.05])
def test_concurrent_calls_of_one_member_are_served_one_after_another(slow: float) -> None:
    """However slow another member is, no batch is formed without a member that has not called yet."""

    async def scenario() -> list[tuple[str, ...]]:
        batches: list[tuple[str, ...]] = []

        async def serve(items: Sequence[str]) -> list[str]:
            batches.append(tuple(items))
            return list(items)

        queue, by_key = CallQueue("engine", serve, 8), BatchByKey(3)

        async def member(key: str, calls: int, wait: float) -> None:
            turns = by_key.one_at_a_time()

            async def ask(turn: int) -> None:
                async with turns:
                    assert await by_key.call(queue, f"{key}/{turn}", f"{key}{turn}") == f"{key}{turn}"

            async with by_key.member():
                await asyncio.sleep(wait)
                await asyncio.gather(*(ask(turn) for turn in range(calls)))

        members = (member("a", 2, 0.0), member("b", 1, 0.0), member("c", 1, slow))
        await asyncio.wait_for(asyncio.gather(*members), 5)
        return batches

    assert asyncio.run(scenario()) == [("a0", "b0", "c0"), ("a1",)]


def test_batches_by_arrival_do_not_wait_for_an_earlier_batch() -> None:
    """A call made while an earlier batch is being served is served concurrently."""

    async def scenario() -> list[int]:
        finished: list[int] = []
        first_may_end = asyncio.Event()

        async def serve(items: Sequence[int]) -> list[int]:
            if items[0] == 0:
                await first_may_end.wait()
            return list(items)

        queue, batcher = CallQueue("engine", serve, 2), BatchByArrival()

        async def member(number: int) -> None:
            async with batcher.member():
                finished.append(await batcher.call(queue, str(number), number))
                if len(finished) == 3:
                    first_may_end.set()

        await asyncio.wait_for(asyncio.gather(*map(member, range(4))), 5)
        return finished

    assert asyncio.run(scenario()) == [1, 2, 3, 0]


def ask_by_arrival(
    batches: list[list[int]],
    servers: int,
    numbers: Sequence[int],
    bad: int | None = None,
    weight: Callable[[int], int] = int,
) -> list[Any]:
    """The results of calls made at the same time, batched by arrival. Appends the formed batches to `batches`."""

    async def serve(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        await asyncio.sleep(0)
        if bad in items:
            raise TeacherError(f"{bad} is too long")
        return [10 * item for item in items]

    async def scenario() -> list[Any]:
        queue, batcher = (
            CallQueue("score/t", serve, 4, BatchSplit(lambda: servers, weight, 100)),
            BatchByArrival(),
        )
        asked = (batcher.call(queue, str(number), number) for number in numbers)
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)

    return asyncio.run(scenario())


def test_scoring_calls_made_at_the_same_time_share_requests() -> None:
    batches: list[list[int]] = []
    assert ask_by_arrival(batches, 1, range(10)) == [10 * number for number in range(10)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_calls_that_arrive_together_are_divided_among_the_servers() -> None:
    batches: list[list[int]] = []
    assert ask_by_arrival(batches, 3, range(5)) == [0, 10, 20, 30, 40]
    assert batches == [[0, 1], [2, 3], [4]]
    batches.clear()
    assert ask_by_arrival(batches, 0, [7]) == [70], (
        "with no usable replica the call must still be made, since the pool waits for one"
    )


def test_a_request_is_split_when_its_total_weight_exceeds_the_limit() -> None:
    batches: list[list[int]] = []
    assert ask_by_arrival(batches, 1, range(6), weight=[10, 80, 30, 500, 100, 0].__getitem__) == [
        0,
        10,
        20,
        30,
        40,
        50,
    ]
    assert batches == [[0, 1], [2], [3], [4, 5]]


def test_a_bad_call_is_isolated_by_bisecting_its_batch() -> None:
    batches: list[list[int]] = []
    found = ask_by_arrival(batches, 1, range(4), bad=2)
    assert found[:2] == [0, 10] and found[3] == 30 and isinstance(found[2], TeacherError)
    assert batches == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]


def test_an_unavailable_teacher_is_not_asked_again_with_single_calls() -> None:
    asked: list[int] = []

    async def serve(items: Sequence[int]) -> list[int]:
        asked.append(len(items))
        raise TeacherUnavailable("gone")

    async def scenario() -> list[Any]:
        queue, batcher = CallQueue("score/t", serve, 4, BatchSplit(lambda: 1, int, 100)), BatchByArrival()
        return await asyncio.gather(
            *(batcher.call(queue, str(n), n) for n in range(3)), return_exceptions=True
        )

    assert all(isinstance(one, TeacherUnavailable) for one in asyncio.run(scenario())) and asked == [3]


def test_a_shared_request_is_cancelled_only_when_its_last_caller_is_cancelled() -> None:
    async def scenario() -> list[str]:
        events: list[str] = []

        async def serve(items: Sequence[int]) -> list[int]:
            try:
                await asyncio.sleep(0.05 if 3 in items else 60)
            except asyncio.CancelledError:
                events.append(f"{len(items)} cancelled")
                raise
            events.append(f"{len(items)} answered")
            return list(items)

        queue, batcher = CallQueue("score/t", serve, 8, BatchSplit(lambda: 1, int, 100)), BatchByArrival()
        some = [asyncio.create_task(batcher.call(queue, str(n), n)) for n in (1, 2, 3)]
        await asyncio.sleep(0.01)
        some[0].cancel()
        assert await some[2] == 3
        others = [asyncio.create_task(batcher.call(queue, str(n), n)) for n in (4, 5)]
        await asyncio.sleep(0.01)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.01)
        return events

    assert asyncio.run(scenario()) == ["3 answered", "2 cancelled"]


def test_a_queue_that_returns_too_few_results_is_an_error() -> None:
    async def scenario() -> None:
        async def serve(items: Sequence[int]) -> list[int]:
            return []

        by_key = BatchByKey(1)
        async with by_key.member():
            await by_key.call(CallQueue("engine", serve, 2), "a", 1)

    with pytest.raises(RuntimeError, match="0 results for 1 calls"):
        asyncio.run(scenario())


def test_the_other_members_get_their_results_when_one_is_cancelled_during_its_batch() -> None:
    async def scenario() -> list[tuple[str, ...]]:
        batches: list[tuple[str, ...]] = []
        gone = asyncio.Event()

        async def serve(items: Sequence[str]) -> list[str]:
            batches.append(tuple(items))
            if "b" in items:
                await gone.wait()
            return list(items)

        queue, by_key = CallQueue("engine", serve, 8), BatchByKey(3)

        async def member(key: str) -> object:
            async with by_key.member():
                call = asyncio.create_task(by_key.call(queue, key, key))
                if key == "b":
                    await asyncio.sleep(0.02)
                    call.cancel()
                    gone.set()
                return await call

        found = await asyncio.wait_for(asyncio.gather(*map(member, "abc"), return_exceptions=True), 5)
        assert found[0] == "a" and isinstance(found[1], asyncio.CancelledError) and found[2] == "c"
        return batches

    assert asyncio.run(scenario()) == [("a", "b", "c")]


def test_a_call_cancelled_before_its_batch_is_formed_is_not_in_it() -> None:
    async def scenario() -> list[tuple[str, ...]]:
        batches: list[tuple[str, ...]] = []

        async def serve(items: Sequence[str]) -> list[str]:
            batches.append(tuple(items))
            return list(items)

        queue, by_key = CallQueue("engine", serve, 8), BatchByKey(2)

        async def dies_while_waiting() -> str:
            async with by_key.member():
                first = asyncio.create_task(by_key.call(queue, "a", "a"))
                await asyncio.sleep(0.01)
                first.cancel()
                result: str = await by_key.call(queue, "a", "a again")
                return result

        async def late() -> str:
            await asyncio.sleep(0.03)
            async with by_key.member():
                result: str = await by_key.call(queue, "b", "b")
                return result

        await asyncio.wait_for(asyncio.gather(dies_while_waiting(), late()), 5)
        return batches

    assert asyncio.run(scenario()) == [("a again", "b")]
