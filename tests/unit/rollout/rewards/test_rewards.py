"""Rewards as functions of every supported shape; a bad result becomes a DataError that names the row."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

from understudy.errors import ClusterError, ConfigError, DataError
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Reward, Rewards, last_turn, load_reward
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

PROMPT = Prompt("00000-0000001", 1, 0, "add", text="1+1=", columns={"answer": "2"})


def trajectory(text: str = "2", turns: tuple[str, ...] = ()) -> Trajectory:
    tokenizer = chat_tokenizer("chatml")
    ids: list[int] = tokenizer("1+1=")["input_ids"]
    mask = [False] * len(ids)
    for turn in (*turns, text):
        if any(mask):
            ids, mask = [*ids, 0, 0], [*mask, False, False]
        written = [*tokenizer(turn)["input_ids"], tokenizer.eos_token_id]
        ids, mask = ids + written, mask + [True] * len(written)
    length = len(ids)
    return Trajectory(
        "00000-0000001_0_0",
        np.array(ids, np.int32),
        np.array(mask),
        np.zeros(length, np.float32),
        np.zeros(length, np.int32),
        StopReason.EOS,
    )


def reward_of(*rewards: Reward, of: Trajectory | None = None) -> Trajectory:
    scorer = Rewards(rewards, Renderer(chat_tokenizer("chatml"), context=100))
    return asyncio.run(scorer.score(PROMPT, of or trajectory()))


def equals_answer(row: Mapping[str, Any], text: str) -> float:
    return float(text == row["answer"])


async def slowly(row: Mapping[str, Any], text: str) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"score": 0.5, "characters": len(text)}


def by_trajectory(row: Mapping[str, Any], trajectory: Trajectory) -> float:
    return float(trajectory.loss_mask.sum())


class Callable_:
    async def __call__(self, row: Mapping[str, Any], text: str) -> float:
        return 0.25


def test_sync_async_trajectory_and_object_rewards_are_weighted_and_summed() -> None:
    rewarded = reward_of(
        Reward("right", equals_answer, 2.0),
        Reward("slow", slowly),
        Reward("length", by_trajectory, 0.1),
        Reward("object", Callable_()),
    )
    assert rewarded.reward == pytest.approx(2.0 + 0.5 + 0.2 + 0.25)
    assert rewarded.metrics["reward/right"] == 1.0 and rewarded.metrics["reward/slow/characters"] == 1.0


def test_a_reward_gets_the_text_of_the_last_turn_without_special_tokens() -> None:
    several = trajectory("42", turns=("first", "second"))
    assert chat_tokenizer("chatml").decode(last_turn(several).tolist()) == "42<|im_end|>"
    assert reward_of(Reward("seen", lambda row, text: float(text == "42")), of=several).reward == 1.0


def test_without_reward_functions_the_trajectorys_reward_is_left_unchanged() -> None:
    assert reward_of().reward is None


@pytest.mark.parametrize(
    "result", [math.nan, 10**400, {"score": 10**400}, math.inf, None, "1", {"other": 1.0}]
)
def test_a_reward_result_that_is_not_a_finite_number_raises_a_data_error_with_the_row(result: Any) -> None:
    with pytest.raises(DataError, match=r"odd gave .* for row 00000-0000001_0_0"):
        reward_of(Reward("odd", lambda row, text: result))


def test_a_reward_that_raises_is_named_with_the_row() -> None:
    with pytest.raises(DataError, match="broken raised on row 00000-0000001_0_0: ZeroDivisionError"):
        reward_of(Reward("broken", lambda row, text: 1 / 0))


def test_a_plain_function_may_return_a_coroutine() -> None:
    assert reward_of(Reward("wrapped", lambda row, text: slowly(row, text))).reward == 0.5


def exits(row: Mapping[str, Any], text: str) -> float:
    exec("import sys; sys.exit()", {})
    return 1.0


def finds_nothing(row: Mapping[str, Any], text: str) -> float:
    return float(next(line for line in text.splitlines() if line.startswith("Answer")) == "1")


async def exits_late(row: Mapping[str, Any], text: str) -> float:
    await asyncio.sleep(0)
    return exits(row, text)


async def interrupts(row: Mapping[str, Any], text: str) -> float:
    raise KeyboardInterrupt


async def awaits_a_cancelled_task(row: Mapping[str, Any], text: str) -> float:
    task = asyncio.ensure_future(asyncio.sleep(10))
    task.cancel()
    await task
    return 1.0


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (exits, "SystemExit"),
        (exits_late, "SystemExit"),
        (interrupts, "KeyboardInterrupt"),
        (finds_nothing, "StopIteration"),
        (awaits_a_cancelled_task, "CancelledError"),
    ],
)
def test_exit_interrupt_and_cancellation_in_a_reward_fail_only_its_row(function: Any, name: str) -> None:
    with pytest.raises(DataError, match=f"r raised on row 00000-0000001_0_0: RuntimeError: {name}"):
        reward_of(Reward("r", function))


def test_an_async_reward_is_cancelled_when_its_scoring_is_cancelled() -> None:
    async def body() -> None:
        scorer = Rewards([Reward("r", slow)], Renderer(chat_tokenizer("chatml"), context=100))
        async with asyncio.timeout(0.05):
            await scorer.score(PROMPT, trajectory())

    async def slow(row: Mapping[str, Any], text: str) -> float:
        await asyncio.sleep(100)
        return 1.0

    with pytest.raises(TimeoutError):
        asyncio.run(body())


def test_a_thread_that_cannot_be_started_is_a_cluster_error_and_not_a_data_error() -> None:
    def starved(row: Mapping[str, Any], text: str) -> float:
        raise RuntimeError("can't start new thread")

    with pytest.raises(ClusterError, match="starved got no thread: this machine is out of memory"):
        reward_of(Reward("starved", starved))


def test_load_reward_refuses_names_that_cannot_be_loaded() -> None:
    assert load_reward("understudy.rollout.rewards.builtin:exact_match", 0.5).weight == 0.5
    for name, says in (
        ("nonsense", "package.module:object"),
        ("no.such.module:f", "cannot be imported"),
        ("math:nothing", "has no"),
        ("math:pi", "float"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_reward(name)


def test_a_reward_with_verls_signature_is_called_with_verls_arguments() -> None:
    seen: list[Any] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": float(ground_truth == solution_str), "length": len(solution_str)}

    async def with_more(solution_str: str, ground_truth: str, **more: Any) -> float:
        seen.append(sorted(more))
        return 1.0

    columns = {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 3}}
    prompt = Prompt("00000-0000001", 1, 0, "gsm8k", text="1+1=", columns=columns)
    rewards = [Reward("verl", compute_score), Reward("more", with_more)]
    scorer = Rewards(rewards, Renderer(chat_tokenizer("chatml"), context=100))
    rewarded = asyncio.run(scorer.score(prompt, trajectory()))
    assert seen == [("gsm8k", "2", "2", {"index": 3}), ["data_source", "extra_info"]]
    assert rewarded.reward == 2.0 and rewarded.metrics["reward/verl/length"] == 1.0
