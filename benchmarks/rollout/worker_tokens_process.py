"""The worker process of `worker_tokens.py`: one generation per session; rows are counted, not kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from understudy.engines.base import Sampling
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.transcript import Transcript
from understudy.rollout.render import Renderer
from understudy.rollout.workers import process as worker
from understudy.rollout.workers.messages import Setup
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

PROMPT_TOKENS = 256


class OneTurn:
    """An agent loop: a prompt of `PROMPT_TOKENS` tokens and one generation."""

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        transcript = Transcript(np.arange(1, PROMPT_TOKENS + 1, dtype=np.int32))
        transcript.write(await context.generate(transcript.tokens, context.sampling, 0))
        return [transcript.finish(context.row_key())]


class CountingHandler:
    """Keeps nothing: answers with the number of tokens."""

    def __init__(self, setup: Setup, renderer: Renderer) -> None:
        self.work: dict[str, Any] = {}

    async def store(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], segment: int, sampling: Sampling
    ) -> bytes:
        return str(len(trajectories[0].tokens)).encode()

    async def close(self) -> None:
        return


if __name__ == "__main__":
    worker.main(CountingHandler)
