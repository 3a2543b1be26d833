"""A worker whose run is gone ends without output: its stderr is the run's, which has just reported why it ended."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
from chat_tokenizers import chat_tokenizer
from recording_engine import CONTEXT

from understudy.engines.base import Sampling
from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.connections import WORKER_MODULE
from understudy.types.prompt import Prompt

SESSIONS = 3


def test_a_worker_whose_run_is_gone_exits_with_code_0_and_prints_no_tracebacks(tmp_path: Path) -> None:
    """The run closed its pipes while generations were under way, so the worker cannot report its sessions."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.save_pretrained(tmp_path)
    setup = wire.Setup(str(tmp_path), "chatty_loop:Chatty", {}, CONTEXT, 8, {}, sys.path)

    async def body() -> tuple[int, str]:
        reading, theirs = os.pipe()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", WORKER_MODULE,
            stdin=asyncio.subprocess.PIPE, stdout=theirs, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        os.close(theirs)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0)
        )
        assert process.stdin is not None
        process.stdin.write(wire.frame(setup))
        for number in range(SESSIONS):
            prompt = Prompt(f"00000-{number:07d}", number, 0, "add", text="1 + 1 =")
            sampling = Sampling(6, (int(np.int64(tokenizer.eos_token_id)),))
            process.stdin.write(wire.frame(wire.Begin(number, prompt, 0, sampling, CONTEXT)))
        asked = 0
        while asked < SESSIONS:
            found = await asyncio.wait_for(wire.read_from_worker(reader), 150)
            assert found is not None
            asked += isinstance(found[0], wire.GenerateCall)
        transport.close()
        await asyncio.sleep(0)  # the pipe is closed by then
        process.stdin.write(b"".join(wire.frame(wire.CancelSession(number)) for number in range(SESSIONS)))
        process.stdin.close()
        _, output = await asyncio.wait_for(process.communicate(), 60)
        return int(process.returncode or 0), output.decode()

    code, output = asyncio.run(body())
    assert (
        code,
        output.replace("printing must not disturb the channel\n", "").replace("nor raw writes", ""),
    ) == (0, "")
