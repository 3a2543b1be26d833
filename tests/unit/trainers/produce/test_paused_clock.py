"""`PausedClock`: a session's deadline is suspended while its generation runs."""

import asyncio

from understudy.trainers.produce.failures import PausedClock


async def generate(clock: asyncio.Timeout, started: asyncio.Event) -> None:
    with PausedClock(clock):
        started.set()
        await asyncio.sleep(3600)


def test_a_generation_cancelled_after_its_sessions_deadline_block_ends_as_cancelled() -> None:
    """A worker's session cancels its generations, which are separate tasks, when it ends."""

    async def scenario() -> asyncio.Task[None]:
        clock, started = asyncio.timeout(60), asyncio.Event()
        async with clock:
            generation = asyncio.create_task(generate(clock, started))
            await started.wait()
            generation.cancel()
        await asyncio.wait([generation])
        return generation

    assert asyncio.run(scenario()).cancelled()


def test_the_sessions_deadline_is_extended_by_the_duration_of_the_generation() -> None:
    async def scenario() -> tuple[float, float | None, float]:
        async with asyncio.timeout(60) as clock:
            before = clock.when() or 0.0
            with PausedClock(clock):
                stopped = clock.when()
                await asyncio.sleep(0.05)
            return before, stopped, clock.when() or 0.0

    before, stopped, after = asyncio.run(scenario())
    assert stopped is None and after >= before + 0.05
