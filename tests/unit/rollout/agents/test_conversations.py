"""Agents that exchange only messages: a continued conversation keeps its tokens, a changed one is a new trajectory."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from chat_tokenizers import FAMILIES, chat_tokenizer
from recording_engine import attempt

from understudy.engines.base import Generation, Sampling
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.conversations import Conversations, NoRoom
from understudy.rollout.agents.toolcalls import parse_hermes
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

USER = {"role": "user", "content": "What is 12 * 3?"}
PROMPT = Prompt("00000-0000000", 0, 0, "", messages=(USER,))


class Agent:
    """A loop that calls one function with its conversations."""

    def __init__(self, body: Callable[[Conversations], Awaitable[Any]]) -> None:
        self._body = body

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        conversations = Conversations(prompt, context)
        await self._body(conversations)
        return conversations.finish(reward=0.5, metrics={"env/turns": 2.0})


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stripped", [False, True])
def test_a_continued_conversation_is_one_trajectory_of_the_engines_own_tokens(
    family: str, stripped: bool
) -> None:
    async def body(conversations: Conversations) -> None:
        first = await conversations.answer([USER])
        text = first.text.strip() if stripped else first.text
        more = [USER, answered(text), {"role": "user", "content": "Sure?"}]
        second = await conversations.answer(more)
        await conversations.answer([*more, answered(second.text), {"role": "user", "content": "Really?"}])

    tokenizer = chat_tokenizer(family)
    (((trajectory,),), engine) = attempt(tokenizer, Agent(body), [PROMPT], context=256)
    asked = engine.written[PROMPT.key]
    assert trajectory.turns == len(asked) == 3
    for request, generation in asked:
        grown = [*request.tokens.tolist(), *generation.tokens.tolist()]
        assert trajectory.tokens[: len(grown)].tolist() == grown, "what the model saw is what the row holds"
    written = [int(i) for _, generation in asked for i in generation.tokens]
    assert trajectory.tokens[trajectory.loss_mask].tolist() == written
    assert "Sure?" in tokenizer.decode(trajectory.tokens)
    assert (trajectory.key, trajectory.reward) == ("00000-0000000_0_0", 0.5)
    assert trajectory.metrics == {"env/turns": 2.0}


TOOL = {"type": "function", "function": {"name": "less", "parameters": {}}}


@pytest.mark.parametrize("of_row", [False, True])
def test_a_conversation_continues_with_the_chat_template_that_rendered_its_first_prompt(of_row: bool) -> None:
    """The template for chats with tools, whether the agent or the row gives the tools."""
    tokenizer = chat_tokenizer("chatml")
    marked = tokenizer.chat_template.replace("<|im_start|>user\\n", "<|im_start|>user with tools\\n")
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": marked}

    async def body(conversations: Conversations) -> None:
        given = None if of_row else [TOOL]
        first = await conversations.answer([USER], tools=given)
        more = [USER, answered(first.text), {"role": "user", "content": "Sure?"}]
        await conversations.answer(more, tools=given)

    prompt = replace(PROMPT, columns={"tools": [TOOL]} if of_row else {})
    (((trajectory,),), _) = attempt(tokenizer, Agent(body), [prompt], context=512)
    text = tokenizer.decode(trajectory.tokens)
    assert trajectory.turns == 2 and text.count("<|im_start|>user with tools\n") == 2
    assert text.count("<|im_start|>user") == 2


def test_messages_of_content_parts_are_compared_part_by_part() -> None:
    shown = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    other = {"role": "user", "content": [{"type": "text", "text": "What is it?"}]}
    conversations = Conversations(PROMPT, cast("LoopContext", None))
    assert conversations._same(shown, dict(shown))
    assert not conversations._same(shown, other) and not conversations._same(shown, USER)


def test_a_changed_message_history_starts_a_new_trajectory() -> None:
    async def body(conversations: Conversations) -> None:
        first = await conversations.answer([USER])
        await conversations.answer([USER, answered(first.text + "!"), {"role": "user", "content": "Go on."}])
        await conversations.answer([{"role": "system", "content": "Be brief."}, USER])

    ((trajectories,), engine) = attempt(chat_tokenizer("chatml"), Agent(body), [PROMPT], context=256)
    assert [one.key for one in trajectories] == [f"00000-0000000_0_{index}" for index in range(3)]
    assert [one.turns for one in trajectories] == [1, 1, 1]
    for one, (request, generation) in zip(trajectories, engine.written[PROMPT.key], strict=True):
        assert one.tokens.tolist() == [*request.tokens.tolist(), *generation.tokens.tolist()]
        assert int(one.loss_mask.sum()) == len(generation.tokens)


def test_two_interleaved_conversations_become_separate_trajectories() -> None:
    async def body(conversations: Conversations) -> None:
        other = {"role": "user", "content": "And the letters?"}
        mine, theirs = await conversations.answer([USER]), await conversations.answer([other])
        more = {"role": "user", "content": "Sure?"}
        await conversations.answer([other, answered(theirs.text), more])
        await conversations.answer([USER, answered(mine.text), more])

    ((trajectories,), _) = attempt(chat_tokenizer("chatml"), Agent(body), [PROMPT], context=256)
    texts = [chat_tokenizer("chatml").decode(one.tokens) for one in trajectories]
    assert ["12 * 3" in text for text in texts] == [True, False]
    assert [one.turns for one in trajectories] == [2, 2]


class Spelling:
    """A renderer with one token per character."""

    context, pictures = 999, None

    def render(self, prompt: Prompt, tools: Any = None) -> np.ndarray:
        return self._ids("".join(one["content"] for one in prompt.messages or ()))

    def after_turn(
        self, key: str, news: Sequence[Mapping[str, Any]], *, ended: bool, tools: Any = None
    ) -> np.ndarray:
        return self._ids("".join(f"<{one['content']}>" for one in news))

    def decode(self, ids: np.ndarray) -> str:
        return "".join(map(chr, ids))

    def _ids(self, text: str) -> np.ndarray:
        return np.array([ord(letter) for letter in text], np.int32)


def calling(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"n": 1}}}}</tool_call>'


def branched(renamed: bool) -> list[str]:
    """Two sub-agents with one prompt call different tools; the first continues. Returns the trajectories' texts."""
    spelling, texts = Spelling(), iter([calling("X"), calling("Y"), "done"])

    async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
        ids = spelling._ids(next(texts))
        return Generation(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), StopReason.EOS)

    async def body() -> list[str]:
        context: Any = LoopContext(generate, spelling, Sampling(50), "p", 0, 999)  # type: ignore[arg-type]
        conversations, user = Conversations(PROMPT, context), {"role": "user", "content": "q"}
        answers = [await conversations.answer([user], parse=parse_hermes) for _ in "XY"]
        assert [one.tool_calls[0]["id"] for one in answers] == ["call-0-0", "call-1-0"]
        call = answers[0].tool_calls[0]
        if renamed:  # an agent that sets its own call ids and serializes the arguments as text
            call = {"id": "0", "function": {"name": "X", "arguments": '{"n":1}'}}
        back = {"role": "assistant", "content": "", "tool_calls": [call]}
        await conversations.answer([user, back, {"role": "tool", "content": "result of X"}])
        return [spelling.decode(one.tokens) for one in conversations.finish()]

    return asyncio.run(body())


@pytest.mark.parametrize("renamed", [False, True])
def test_answers_that_differ_only_in_their_tool_calls_continue_the_right_conversation(renamed: bool) -> None:
    assert branched(renamed) == [f"q{calling('X')}<result of X>done", f"q{calling('Y')}"]


def test_a_full_context_raises_no_room_and_keeps_the_turns_already_generated() -> None:
    async def body(conversations: Conversations) -> None:
        first = await conversations.answer([USER], max_new_tokens=4)
        assert first.new_tokens <= 4
        with pytest.raises(NoRoom, match="the context is 60"):
            await conversations.answer(
                [USER, answered(first.text), {"role": "user", "content": "word " * 60}]
            )

    (((trajectory,),), _) = attempt(
        chat_tokenizer("chatml"), Agent(body), [PROMPT], context=60, sampling=Sampling(8)
    )
    assert trajectory.turns == 1
    assert len(trajectory.tokens) < 60, "what did not fit is not in the row"
    assert np.count_nonzero(trajectory.loss_mask) <= 4
