"""Agent loops some of whose rollouts fail, chosen by the prompt's ordinal."""

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np

from understudy.errors import EngineError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.single_turn import SingleTurn
from understudy.rollout.agents.transcript import Transcript
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory


class Troubled:
    """Raises or hangs for the prompts with these ordinals."""

    def __init__(self, raises: list[int], hangs: list[int]) -> None:
        self._raises, self._hangs = raises, hangs

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        if prompt.ordinal in self._raises:
            raise RuntimeError("the environment broke")
        if prompt.ordinal in self._hangs:
            await asyncio.sleep(3600)
        return await SingleTurn().run(prompt, context)


class GivesOut:
    """Serves training and the first `good` answers to held-out problems; then raises as if its engine were gone."""

    def __init__(self, good: int) -> None:
        self._good, self._answers = good, 0

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        if prompt.key.startswith("eval-"):
            self._answers += 1
            if self._answers > self._good:
                raise EngineError("the engine of this loop is gone")
        return await SingleTurn().run(prompt, context)


class WritesId:
    """Begins each rollout with the given id, which might come from the output of a tool."""

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
    """Rollouts of prompts with these ordinals never end; the first of them also interrupts the run."""

    holding: range = range(0)

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        if prompt.ordinal in self.holding:
            if prompt.ordinal == self.holding[0]:
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(3600)
        return await SingleTurn().run(prompt, context)


class Misshapes:
    """Returns trajectories that it made itself; which fault one has depends on the prompt's ordinal."""

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        (one,) = await SingleTurn().run(prompt, context)
        logprobs, mask = one.behaviour_logprobs.copy(), one.loss_mask.copy()
        match prompt.ordinal:
            case 0 | 1 | 2:
                logprobs[mask] = (np.nan, -np.inf, 0.5)[prompt.ordinal]
                return [replace(one, behaviour_logprobs=logprobs)]
            case 3:
                logprobs[0], mask[0] = -1.0, True
                return [replace(one, behaviour_logprobs=logprobs, loss_mask=mask)]
            case 4:
                return [replace(one, loss_mask=mask.astype(np.int32))]
            case 5:
                more = context.context

                def longer(stream: np.ndarray, value: float) -> np.ndarray:
                    return np.concatenate([stream, np.full(more, value, stream.dtype)])

                return [
                    replace(
                        one, tokens=longer(one.tokens, 1), loss_mask=longer(mask, False),
                        behaviour_logprobs=longer(logprobs, np.nan), weight_versions=longer(one.weight_versions, -1),
                    )
                ]  # fmt: skip
            case 6:
                return [replace(one, turns=2.5)]
            case 7:  # correct values in another dtype
                return [replace(one, tokens=one.tokens.astype(np.int64))]
        return [one]
