"""Environments of the `verifiers` package: their turns keep the engine's tokens, their reward is the trajectory's."""

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

from understudy.engines.base import Generation, Sampling
from understudy.errors import EngineError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.registry import build_loop
from understudy.rollout.agents.verifiers_env import write_rows
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

pytest.importorskip("verifiers", reason='pip install "understudy[verifiers]"')
if not any(importlib.util.find_spec(name) for name in ("verifiers.envs", "verifiers.legacy")):
    pytest.skip("verifiers 0.4 and newer have no environments", allow_module_level=True)

ENV = "small_verifiers_env"
CONTEXT = 512


def play(
    texts: Sequence[str], prompt: Prompt, kind: str = "again", context: int = CONTEXT
) -> list[Trajectory]:
    """Runs the environment; the engine generates the given texts, one token per letter, unlike the tokenizer would."""
    tokenizer = chat_tokenizer("chatml")
    turns: list[tuple[np.ndarray, Generation]] = []

    async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
        if texts[turn] == "crash":
            raise EngineError("the engine is gone")
        ids = [i for letter in texts[turn] for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
        ids = [*ids, tokenizer.eos_token_id]
        generation = Generation(
            np.array(ids, np.int32),
            np.full(len(ids), -0.5, np.float32),
            np.full(len(ids), turn, np.int32),
            StopReason.EOS,
        )
        turns.append((tokens, generation))
        return generation

    async def body() -> list[Trajectory]:
        loop = build_loop("verifiers", {"env": ENV, "env_args": {"kind": kind}})
        renderer = Renderer(tokenizer, context=context)
        return await loop.run(prompt, LoopContext(generate, renderer, Sampling(400), prompt.key, 0, context))

    trajectories = asyncio.run(body())
    for trajectory in trajectories:
        for tokens, generation in turns:
            grown = [*tokens.tolist(), *generation.tokens.tolist()]
            assert trajectory.tokens[: len(grown)].tolist() == grown, (
                "the row does not hold the tokens of this request"
            )
    return trajectories


def prompts(path: Path, kind: str = "again") -> list[Prompt]:
    assert write_rows(ENV, path / "rows.jsonl", {"kind": kind}) == 2
    rows = [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()]
    return [
        Prompt(
            f"00000-000000{i}", i, 0, row.pop("data_source"), messages=tuple(row.pop("messages")), columns=row
        )
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize(("answer", "reward"), [("It is 36.", 1.0), ("It is 35.", 0.0)])
def test_turns_of_a_verifiers_environment_are_one_trajectory_with_its_reward(
    tmp_path: Path, answer: str, reward: float
) -> None:
    (trajectory,) = play(["Hm, 30?", answer], prompts(tmp_path)[0])
    assert trajectory.turns == 2
    assert trajectory.reward == reward
    assert trajectory.metrics["env/right"] == reward
    text = chat_tokenizer("chatml").decode(trajectory.tokens)
    assert "What is 12 * 3?" in text and "Are you sure?" in text
    written = chat_tokenizer("chatml").decode(trajectory.tokens[trajectory.loss_mask])
    assert written == f"Hm, 30?<|im_end|>{answer}<|im_end|>"


def test_tools_of_a_verifiers_environment_are_described_called_and_answered(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "multiply", "arguments": {"first": 12, "second": 3}}</tool_call>'
    (trajectory,) = play([f"I multiply. {call}", "So 36."], prompts(tmp_path, "tools")[0], kind="tools")
    text = chat_tokenizer("chatml").decode(trajectory.tokens)
    assert "<tool_response>\n36\n</tool_response>" in text
    assert '"multiply"' in text.partition("What is 12")[0], "the tool is described to the model"
    assert (trajectory.turns, trajectory.reward) == (2, 1.0)


def test_an_engine_error_during_a_verifiers_session_is_raised_and_not_scored(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the engine is gone"):
        play(["crash"], prompts(tmp_path)[0])


def test_a_verifiers_conversation_ends_when_it_fills_the_context(tmp_path: Path) -> None:
    (trajectory,) = play(["x" * 60, "y"], prompts(tmp_path)[0], context=100)
    assert trajectory.turns == 1
    assert len(trajectory.tokens) <= 100
