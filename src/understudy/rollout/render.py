"""Renders messages to token ids with the student's chat template, once per turn boundary.

The model's own output is never rendered again: a chat template may drop thinking, reorder tool calls or
change white space, and the trained tokens would no longer be those the engine produced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.errors import DataError
from understudy.types.prompt import Prompt

_MARKER = "understudy-turn-marker"


class Renderer:
    """Turns prompts into ids with a student's tokenizer and chat template.

    `context` is the student's maximum sequence length; `reserve` tokens of it stay free for an answer. A
    prompt may have at most `max_prompt` tokens, and at most `context − reserve`. A longer one raises
    `DataError`, or loses its first tokens (`truncate`). `template_options` are passed to the template
    (`enable_thinking = false`).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        context: int,
        reserve: int = 1,
        template_options: Mapping[str, Any] | None = None,
        max_prompt: int | None = None,
        truncate: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._context, self._reserve = context, reserve
        self._limit = min(max_prompt or context, context - reserve)
        self._truncate = truncate
        self._template_options = dict(template_options or {})
        self._special_ids = set(tokenizer.all_special_ids)
        self._ready: dict[str, tuple[Prompt, np.ndarray]] = {}
        """By key: prompts that `ahead` has rendered."""

    @property
    def context(self) -> int:
        """The maximum length of a rollout in tokens."""
        return self._context

    def render(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None) -> np.ndarray:
        """int32 [T]: the tokens of this prompt, up to where the student's answer starts.

        `tools` are function schemas for the template; without them the row's own `tools` column is used.
        """
        ready = self._ready.get(prompt.key)
        if ready is not None and ready[0] is prompt and tools is None:
            return ready[1]
        if prompt.text is not None:
            ids = self._tokenize(prompt.key, prompt.text, special=True)
        else:
            tools = tools or prompt.columns.get("tools")
            text = self._apply_template(prompt.key, prompt.messages, tools=tools, generate=True)
            ids = self._tokenize(prompt.key, text, special=False)
        if len(ids) == 0:
            raise DataError(f"prompt {prompt.key} (row {prompt.ordinal}) renders to no tokens at all")
        if len(ids) <= self._limit:
            return ids
        if self._truncate and self._limit > 0:
            return ids[-self._limit :]
        if self._limit < self._context - self._reserve:
            raise DataError(
                f"prompt {prompt.key} (row {prompt.ordinal}) has {len(ids)} tokens; data.max_prompt_tokens is {self._limit}"
            )
        raise DataError(
            f"prompt {prompt.key} (row {prompt.ordinal}) has {len(ids)} tokens; the context is {self._context} and "
            f"{self._reserve} of it are kept for the answer. Shorten the prompt or lower rollout.max_new_tokens"
        )

    def ahead(self, prompts: Sequence[Prompt]) -> None:
        """Render these chats in one batch, for later `render` calls of all their sessions; half the work of
        rendering one by one. Prompts that cannot be rendered are left to `render`, which raises the error.
        Those of an earlier call are dropped."""
        self._ready = {}
        chats = [prompt for prompt in prompts if prompt.text is None and not prompt.columns.get("tools")]
        if not chats or not getattr(self.tokenizer, "chat_template", None):
            return
        try:
            texts = self.tokenizer.apply_chat_template(
                [[dict(message) for message in prompt.messages] for prompt in chats],
                tokenize=False,
                add_generation_prompt=True,
                **self._template_options,
            )
            rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        except Exception:  # one prompt cannot be rendered; `render` will say which
            return
        for prompt, ids in zip(chats, rows, strict=True):
            if 0 < len(ids) <= self._limit:
                self._ready[prompt.key] = (prompt, np.asarray(ids, dtype=np.int32))

    def after_turn(self, key: str, messages: Sequence[Mapping[str, Any]], *, ended: bool) -> np.ndarray:
        """int32 [T]: the tokens between the student's turn and its next one, with `messages` in between.

        `ended`: the student wrote its own end-of-turn token, so the template's is left out; the rest of the
        separator stays. Method: render a conversation in which the assistant's message is a marker, and take
        everything after the marker. The tokens of the turn itself are never changed.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}, *messages]
        text = self._apply_template(key, chat, tools=None, generate=True)
        if _MARKER not in text:
            raise DataError(
                f"prompt {key}: the chat template leaves out what the assistant says before {messages[0].get('role')} messages"
            )
        ids = self._tokenize(key, text.rpartition(_MARKER)[2], special=False)
        if ended and len(ids) and int(ids[0]) in self._special_ids:
            ids = ids[1:]
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text without special tokens, for display, rewards and tool parsers."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def _apply_template(
        self, key: str, messages: Sequence[Mapping[str, Any]], *, tools: Any, generate: bool
    ) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"prompt {key} is a chat, but the student's tokenizer has no chat template; "
                "give rows a plain `prompt`, or use an instruction-tuned student"
            )
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=generate,
                **self._template_options,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise DataError(f"prompt {key} cannot be rendered by the chat template: {error}") from error

    def _tokenize(self, key: str, text: str, *, special: bool) -> np.ndarray:
        try:
            ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        except Exception as error:
            raise DataError(f"prompt {key} cannot be tokenized: {error}") from error
        return np.asarray(ids, dtype=np.int32)
