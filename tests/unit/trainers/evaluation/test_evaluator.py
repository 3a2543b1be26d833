"""The evaluator's answers: agent loops may ask for several generations, and a failed answer counts as unsolved."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.transcript import Transcript
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards
from understudy.trainers.evaluation.evaluator import Evaluator
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

TOKENIZER = chat_tokenizer("chatml")
RENDERER = Renderer(TOKENIZER, context=1024)
PROBLEMS = [
    Prompt(f"eval-{i:07d}", i, 0, "", messages=({"role": "user", "content": "question"},)) for i in range(3)
]


class Engine:
    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.batches.append([request.key for request in requests])
        await asyncio.sleep(0.001)
        end = np.array([TOKENIZER.eos_token_id], np.int32)
        return [
            Generation(end, np.zeros(1, np.float32), np.zeros(1, np.int32), StopReason.EOS) for _ in requests
        ]


class TwoDrafts:
    """Asks for two generations at once."""

    def of(self, prompt: Prompt) -> Any:
        return self

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        start = context.renderer.render(prompt)
        drafts = await asyncio.gather(*(context.generate(start, context.sampling, turn) for turn in range(2)))
        outputs = []
        for index, draft in enumerate(drafts):
            transcript = Transcript(start)
            transcript.write(draft)
            outputs.append(transcript.finish(context.row_key(index)))
        return outputs


class AwaitsCancelledTask(TwoDrafts):
    """For one problem, awaits a task that it has cancelled."""

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        if prompt.ordinal == 1:
            task = asyncio.ensure_future(asyncio.sleep(9))
            task.cancel()
            await task
        return (await super().run(prompt, context))[:1]


class RaisesSystemExit(TwoDrafts):
    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        if prompt.ordinal == 1:
            raise SystemExit(0)
        return (await super().run(prompt, context))[:1]


class UnknownStopReason(TwoDrafts):
    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        (one, _) = await super().run(prompt, context)
        return [replace(one, stop_reason="stop")] if prompt.ordinal == 1 else [one]  # type: ignore[arg-type]


def evaluate(loops: Any) -> tuple[Evaluator, Engine]:
    engine, sampling = Engine(), Sampling(max_new_tokens=8, stop_ids=(TOKENIZER.eos_token_id,))
    evaluator = Evaluator(engine, loops, Rewards([], RENDERER), RENDERER, sampling, 1024, 64, 5.0)  # type: ignore[arg-type]
    assert len(asyncio.run(asyncio.wait_for(evaluator.greedy(PROBLEMS), 20))) == len(PROBLEMS)
    return evaluator, engine


@pytest.mark.parametrize(
    ("loops", "name"), [(AwaitsCancelledTask(), "CancelledError"), (RaisesSystemExit(), "SystemExit")]
)
def test_exit_and_cancellation_in_an_evaluated_loop_fail_only_its_problem(loops: Any, name: str) -> None:
    evaluator, _ = evaluate(loops)
    assert [(one.prompt.ordinal, one.reason) for one in evaluator.failures] == [
        (1, f"RuntimeError: {name}" + ": 0" * (name == "SystemExit"))
    ]


def test_concurrent_generations_of_an_evaluated_loop_are_served_one_after_another() -> None:
    evaluator, engine = evaluate(TwoDrafts())
    assert not evaluator.failures
    assert engine.batches == [[f"{one.key}/0/{turn}" for one in PROBLEMS] for turn in range(2)]


def test_an_unknown_stop_reason_fails_only_its_evaluated_problem() -> None:
    evaluator, _ = evaluate(UnknownStopReason())
    (failed,) = evaluator.failures
    assert failed.prompt.ordinal == 1 and "stop_reason = 'stop'; expected one of 'eos'" in failed.reason
