"""Remote rollout workers: the same rows as local loops, restarts after a kill, unauthorized connections closed."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from chat_tokenizers import chat_tokenizer

from understudy.assembly import sessions as loops
from understudy.cluster.local import LocalProcesses
from understudy.engines.base import Generation, Sampling
from understudy.errors import ClusterError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.render import Renderer
from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.pool import LoopWorkers
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason

TOKENIZER = chat_tokenizer("chatml")
AGENT = "chatty_loop:Chatty"


class RemoteProcesses(LocalProcesses):
    full = False

    def is_remote(self, name: str) -> bool:
        return True

    async def start(self, name: str, *arguments: Any) -> Any:
        if self.full:
            raise ClusterError(f"{name} has no machine now")
        return await super().start(name, *arguments)


async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
    n = int(tokens.sum()) % 5 + 1
    return Generation(
        np.arange(3, 3 + n, dtype=np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), StopReason.EOS
    )


@pytest.mark.slow
def test_remote_workers_give_the_same_rows_after_a_kill_and_unauthorized_connections(tmp_path: Path) -> None:
    renderer = Renderer(TOKENIZER, context=96)
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    rows = [Prompt(f"00000-{i:07d}", i, 0, "add", text=f"{i} + {i} =") for i in range(6)]

    def context(prompt: Prompt) -> LoopContext:
        return LoopContext(generate, renderer, Sampling(6, (2,)), prompt.key, 0, 96)

    async def body() -> None:
        processes = RemoteProcesses(tmp_path / "logs")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(processes.close)
            open_line = await loops._lines(processes, stack)
            workers = LoopWorkers(
                2, tokenizer=tmp_path / "tokenizer", agent=AGENT, context=96, open_line=open_line
            )
            stack.push_async_callback(workers.close)
            await workers.start()
            first = workers.pids

            async def check() -> None:
                results = await asyncio.gather(*(workers.run(row, context(row)) for row in rows))
                for row, (remote,) in zip(rows, results, strict=True):
                    (local,) = await LoopChoice(AGENT).of(row).run(row, context(row))
                    assert (remote.key, remote.tokens.tolist()) == (local.key, local.tokens.tolist())

            await check()
            listener: Any = open_line.__self__  # type: ignore[attr-defined]
            host, _, port = listener._address.rpartition(":")
            for greeting in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"\xff" * 64,
                wire.frame(wire.Hello("no", 0)),
                b"\2\0\0\0xx",
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(greeting)
                writer.write_eof()
                assert await asyncio.wait_for(reader.read(), 20) == b"", (
                    "the unauthorized connection stays open"
                )
                writer.close()
            os.kill(first[0], signal.SIGKILL)
            await check()
            assert workers.pids[0] != first[0] and workers.pids[1] == first[1], (
                "only the killed worker must be restarted"
            )
            processes.full = True
            os.kill(workers.pids[0], signal.SIGKILL)
            await check()  # the remaining worker runs every row
            pids = [*first, *workers.pids]
        assert not [pid for pid in pids if psutil.pid_exists(pid)]

    asyncio.run(asyncio.wait_for(body(), 120))
