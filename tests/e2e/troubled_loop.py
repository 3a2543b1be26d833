"""An agent loop some of whose rollouts go wrong: by the prompt's place, not by chance."""

import asyncio
import os
import signal

import numpy as np

from understudy.errors import EngineError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.single_turn import SingleTurn
from understudy.rollout.agents.transcript import Transcript
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory


class Troubled:
    """`raises` and `hangs` are ordinals of prompts."""

    def __init__(self, raises: list[int], hangs: list[int]) -> None:
        self._raises, self._hangs = raises, hangs

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        if prompt.ordinal in self._raises:
            raise RuntimeError("the environment broke")
        if prompt.ordinal in self._hangs:
            await asyncio.sleep(3600)
        return await SingleTurn().run(prompt, context)


class GivesOut:
    """Serves training, and the first `good` answers to held-out problems; then its engine is gone."""

    def __init__(self, good: int) -> None:
        self._good, self._answers = good, 0

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        if prompt.key.startswith("eval-"):
            self._answers += 1
            if self._answers > self._good:
                raise EngineError("the engine of this loop is gone")
        return await SingleTurn().run(prompt, context)


class WritesId:
    """Begins each rollout with an id, as the output of a tool may hold one."""

    def __init__(self, token: int) -> None:
        self._token = token

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        transcript = Transcript(
            np.concatenate([[self._token], context.renderer.render(prompt)]).astype(np.int32)
        )
        transcript.write(
            await context.generate(transcript.tokens, context.sampling_after(len(transcript)), 0)
        )
        return [transcript.finish(context.row_key())]


class HoldsPublish:
    """Prompts of these ordinals interrupt the run and never end."""

    holding: range = range(0)

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        if prompt.ordinal in self.holding:
            if prompt.ordinal == self.holding[0]:
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(3600)
        return await SingleTurn().run(prompt, context)
