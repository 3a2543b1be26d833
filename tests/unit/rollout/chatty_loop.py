"""An agent loop for the worker tests. Worker processes load this module, so it imports nothing heavy."""

import asyncio
import contextlib
import multiprocessing
import os
import time

import numpy as np

from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.transcript import Transcript
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory


class Chatty:
    """Generates two turns, prints to stdout, and misbehaves as the row's columns say (raises, exits, forks, …)."""

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        print("printing must not disturb the channel")
        os.write(1, b"nor raw writes")
        if prompt.columns.get("raises"):
            raise KeyError("loop bug")
        if prompt.columns.get("exits"):
            raise SystemExit(0)
        if prompt.columns.get("leaks"):
            task = asyncio.ensure_future(asyncio.sleep(10))
            task.cancel()
            await task
        if prompt.columns.get("dies"):
            os._exit(7)
        if prompt.columns.get("forks"):
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
        if prompt.columns.get("impatient"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    context.generate(context.renderer.render(prompt), context.sampling, 9), 0.3
                )
        transcript = Transcript(context.renderer.render(prompt))
        transcript.write(await context.generate(transcript.tokens, context.sampling, 0))
        transcript.observe(np.array([5, 6], np.int32))
        transcript.write(await context.generate(transcript.tokens, context.sampling, 1))
        return [
            transcript.finish(
                context.row_key(), metrics={"a": 1.0}, extra={"pid": os.getpid(), "row": dict(prompt.columns)}
            )
        ]
