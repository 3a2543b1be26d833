"""Chat interface for agents that work with messages instead of tokens.

Such an agent sends the whole conversation each time. If it extends a known conversation, that conversation is
continued by token: the model's tokens stay as the engine produced them, and only the new messages are rendered.
Anything else (another system prompt, a cut or edited history, a sub-agent) starts a new conversation and a new
trajectory.

    [user a]                         ─> conversation 0: answer b
    [user a, assistant b, user c]    ─> conversation 0 continues: answer d
    [user summary-of-it, user e]     ─> conversation 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from understudy.errors import DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.transcript import Transcript
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
    stop_reason: StopReason
    prompt_tokens: int
    new_tokens: int


@dataclass(slots=True)
class _Conversation:
    transcript: Transcript
    said: list[Message]
    """All messages so far, with the student's answers as they were returned to the agent."""
    ended: bool = False
    """Whether the student ended its last turn itself."""


@dataclass(slots=True)
class Conversations:
    """All conversations of one session of one prompt."""

    prompt: Prompt
    context: LoopContext
    _all: list[_Conversation] = field(default_factory=list)
    _turns: int = 0

    async def answer(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        shown: Callable[[str], str] = str,
    ) -> Answer:
        """Generates the student's next turn after `messages`; raises `NoRoom` if no token fits.

        `shown` maps the text to the content with which the agent will send it back, where the two differ.
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
        conversation.said = list(messages)
        sampling = self.context.sampling_after(len(transcript), transcript.generated)
        if max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, max_new_tokens))
        turn, self._turns, before = self._turns, self._turns + 1, len(transcript)
        generation = await self.context.generate(transcript.tokens, sampling, turn)
        transcript.write(generation)
        text = self.context.renderer.decode(generation.tokens)
        conversation.ended = generation.stop_reason is StopReason.EOS
        conversation.said = [*messages, {"role": "assistant", "content": shown(text)}]
        return Answer(text, generation.stop_reason, before, len(generation.tokens))

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
            known = len(conversation.said)
            news = messages[known:]
            if (
                news
                and all(message["role"] != "assistant" for message in news)
                and all(map(_same, conversation.said, messages[:known]))
            ):
                new = self.context.renderer.after_turn(self.prompt.key, news, ended=conversation.ended)
                return conversation, new
        return None

    def _begun(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[_Conversation, np.ndarray]:
        asked = replace(self.prompt, messages=tuple(messages), text=None)
        tokens = self.context.renderer.render(asked, tools=tools)
        conversation = _Conversation(Transcript(tokens), list(messages))
        self._all.append(conversation)
        return conversation, tokens[:0]


def _same(known: Message, sent: Message) -> bool:
    """Whether a message came back unchanged, apart from surrounding white space, which many agents strip."""
    texts = [message.get("content") or "" for message in (known, sent)]
    return bool(known["role"] == sent["role"] and texts[0].strip() == texts[1].strip())
