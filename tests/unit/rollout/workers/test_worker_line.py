"""The line to a worker on another machine, where that machine goes without hanging up."""

import asyncio

from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.connections import WorkerListener


def test_a_worker_that_is_known_to_be_gone_is_hung_up_on() -> None:
    """Its connection stays open, as that of a machine without power does; only its launcher knows."""

    async def body() -> None:
        alive, dismissed = True, []
        strangers: list[asyncio.StreamWriter] = []

        async def launch(number: int, address: str) -> int:
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(wire.frame(wire.Hello("secret", number)))
            strangers.append(writer)
            return 4711

        async def dismiss(number: int) -> None:
            dismissed.append(number)

        board = WorkerListener(launch, dismiss, lambda number: alive, "secret")
        await board.listen("127.0.0.1")
        line = await board.open(3)
        coming = asyncio.ensure_future(wire.read_from_worker(line.reader))
        await asyncio.sleep(0.05)
        assert not coming.done()
        alive = False
        assert await asyncio.wait_for(coming, 5) is None
        assert "went away" in await line.ended()
        assert dismissed == [3], "what may be left of it is ended before others do its work"
        strangers[0].close()
        await board.close()

    asyncio.run(body())
