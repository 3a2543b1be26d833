"""Chat interface for agents that work with messages instead of tokens.

Such an agent sends the whole conversation each time. If it extends a known conversation, that conversation is
continued by token: the model's tokens stay as the engine produced them, and only the new messages are rendered.
Anything else (another system prompt, a cut or edited history, a sub-agent) starts a new conversation and a new
trajectory. Tool calls have ids that are unique in the session, so two answers that differ in their calls alone are
told apart.

    [user a]                         ─> conversation 0: answer b
    [user a, assistant b, user c]    ─> conversation 0 continues: answer d
    [user summary-of-it, user e]     ─> conversation 1
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from understudy.errors import DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.toolcalls import Parse, ToolCall, text_beside
from understudy.rollout.agents.transcript import Transcript
from understudy.rollout.render import shown_tools
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

Message = Mapping[str, Any]


class NoRoom(DataError):
    """The conversation fills the context, or the student's token budget is used up."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the student wrote in one turn."""

    text: str
    """Without special tokens; tool calls are included as the model wrote them."""
    content: str
    """The text beside the tool calls, if these are parsed."""
    tool_calls: tuple[Message, ...]
    """The calls that could be parsed, in OpenAI's format."""
    stop_reason: StopReason
    prompt_tokens: int
    new_tokens: int


@dataclass(slots=True)
class _Conversation:
    transcript: Transcript
    messages: list[Message]
    """All messages so far, with the student's answers as they were returned to the agent."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The schemas that its prompt showed."""
    ended: bool = False
    """Whether the student ended its last turn itself."""


@dataclass(slots=True)
class Conversations:
    """All conversations of one session of one prompt."""

    prompt: Prompt
    context: LoopContext
    _all: list[_Conversation] = field(default_factory=list)
    _turns: int = 0
    _call_ids: set[str] = field(default_factory=set)
    """Of all tool calls so far."""

    async def answer(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        parse: Parse | None = None,
    ) -> Answer:
        """Generates the student's next turn after `messages`; raises `NoRoom` if no token fits.

        `parse`: for an agent that gets tool calls apart from the text, and sends them back so.
        """
        conversation, new = self._continued(messages) or self._begun(messages, tools)
        transcript = conversation.transcript
        length = len(transcript) + len(new)
        if self.context.spent(transcript.generated) or length >= self.context.context:
            raise NoRoom(
                f"{self.context.row_key()}: the conversation has {length} tokens, {transcript.generated} of them the student's "
                f"own; the context is {self.context.context}"
            )
        transcript.observe(new)
        # Recorded before the generation: the transcript holds these messages even if the generation fails.
        conversation.messages = list(messages)
        sampling = self.context.sampling_after(len(transcript), transcript.generated)
        if max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, max_new_tokens))
        turn, self._turns, before = self._turns, self._turns + 1, len(transcript)
        generation = await self.context.generate(transcript.tokens, sampling, turn)
        transcript.write(generation)
        text = self.context.renderer.decode(generation.tokens)
        conversation.ended = generation.stop_reason is StopReason.EOS
        calls = parse(text) if parse is not None else []
        content = text_beside(text, calls) if parse is not None else text
        good = [call for call in calls if isinstance(call, ToolCall)]
        tool_calls = tuple(_call_message(f"call-{turn}-{index}", call) for index, call in enumerate(good))
        self._call_ids.update(one["id"] for one in tool_calls)
        message = {"role": "assistant", "content": content}
        conversation.messages = [
            *messages,
            message if parse is None else {**message, "tool_calls": tool_calls},
        ]
        return Answer(text, content, tool_calls, generation.stop_reason, before, len(generation.tokens))

    def finish(
        self, *, reward: float | None = None, metrics: Mapping[str, float] | None = None
    ) -> list[Trajectory]:
        """One trajectory per conversation in which the student wrote a turn, each with the session's
        reward."""
        spoken = [one.transcript for one in self._all if one.transcript.turns]
        return [
            replace(one.finish(self.context.row_key(index), metrics=metrics), reward=reward)
            for index, one in enumerate(spoken)
        ]

    def _continued(self, messages: Sequence[Message]) -> tuple[_Conversation, np.ndarray] | None:
        """The conversation that these messages extend, and the tokens of the new messages; None if there is
        none."""
        for conversation in reversed(self._all):
            known = len(conversation.messages)
            news = messages[known:]
            if (
                news
                and all(message["role"] != "assistant" for message in news)
                and all(map(self._same, conversation.messages, messages[:known]))
            ):
                new = self.context.renderer.after_turn(
                    self.prompt.key, news, ended=conversation.ended, tools=conversation.tools
                )
                return conversation, new
        return None

    def _begun(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[_Conversation, np.ndarray]:
        asked = replace(self.prompt, messages=tuple(messages), text=None)
        tokens = self.context.renderer.render(asked, tools=tools)
        conversation = _Conversation(Transcript(tokens), list(messages), shown_tools(self.prompt, tools))
        self._all.append(conversation)
        return conversation, tokens[:0]

    def _same(self, known: Message, sent: Message) -> bool:
        """Whether a message came back unchanged, apart from surrounding white space, which many agents strip."""
        if known["role"] != sent["role"] or _content(known) != _content(sent):
            return False
        ours, theirs = known.get("tool_calls"), sent.get("tool_calls")
        if ours is None or not theirs:  # some agents parse the calls themselves, or do not send them back
            return True
        return len(ours) == len(theirs) and all(map(self._same_call, ours, theirs))

    def _same_call(self, known: Message, sent: Message) -> bool:
        """By our id; if the agent made one of its own, or none, by the function and its arguments."""
        if sent.get("id") in self._call_ids:
            return bool(known.get("id") == sent["id"])
        return _function(known) == _function(sent)


def _content(message: Message) -> Any:
    """A text without the white space around it; the parts of a message with pictures as they are."""
    content = message.get("content") or ""
    return content.strip() if isinstance(content, str) else content


def _call_message(name: str, call: ToolCall) -> Message:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": name, "type": "function", "function": function}


def _function(call: Message) -> tuple[Any, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    try:
        return function.get("name"), json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:  # an integer of thousands of digits is one too
        return function.get("name"), arguments
