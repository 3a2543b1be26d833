"""Evaluations respect the token limits of rollouts."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from chat_tokenizers import chat_tokenizer

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.conversations import Conversations, NoRoom
from understudy.rollout.render import Renderer
from understudy.trainers.evaluation.evaluator import Evaluator
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

USER = {"role": "user", "content": "Go on."}


class EngineOfFullLength:
    """Generates exactly as many tokens as it is asked for."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return [self._written(request.sampling.max_new_tokens) for request in requests]

    def _written(self, count: int) -> Generation:
        versions = np.zeros(count, np.int32)
        return Generation(
            np.full(count, 5, np.int32), np.zeros(count, np.float32), versions, StopReason.LENGTH
        )


class EndlessConversation:
    """A loop that asks for turns until no token fits."""

    def of(self, prompt: Prompt) -> "EndlessConversation":
        return self

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        conversations, messages = Conversations(prompt, context), [USER]
        try:
            while True:
                answer = await conversations.answer(messages)
                messages = [*messages, {"role": "assistant", "content": answer.text}, USER]
        except NoRoom:
            return conversations.finish()


class NoReward:
    names = "none"

    async def score(self, prompt: Prompt, written: Trajectory) -> Trajectory:
        return written


def test_the_turns_of_an_evaluated_answer_share_max_generated() -> None:
    parts: list[Any] = [
        EngineOfFullLength(),
        EndlessConversation(),
        NoReward(),
        Renderer(chat_tokenizer("chatml"), context=400),
    ]
    evaluator = Evaluator(*parts, Sampling(8), 400, 4, deadline_seconds=20, max_generated=20)
    (answer,) = asyncio.run(evaluator.greedy([Prompt("p", 0, 0, "", messages=(USER,))]))
    assert not evaluator.failures
    assert np.count_nonzero(answer.loss_mask) == 20 and answer.turns == 3
