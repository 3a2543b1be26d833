"""Renders messages to token ids with the student's chat template, once per turn boundary.

The model's own output is never rendered again: a chat template may drop thinking, reorder tool calls or
change white space, and the trained tokens would no longer be those the engine produced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from understudy.errors import DataError
from understudy.media.pictures import hashes_in
from understudy.media.processor import PictureReader
from understudy.rollout.template_bounds import bound_chat_templates
from understudy.rollout.template_date import NOW, on_day
from understudy.rollout.template_deadline import within
from understudy.types.prompt import Prompt

_MARKER = "understudy-turn-marker"
_LITERAL = "\ue000{}\ue001"
"""Stands for a placeholder's text in a message while the template runs (private-use characters)."""


class Renderer:
    """Turns prompts into ids with a student's tokenizer and chat template.

    `context` is the student's maximum sequence length; `reserve` tokens of it stay free for an answer. A
    prompt may have at most `max_prompt` tokens, and at most `context − reserve`. A longer one raises
    `DataError`, or loses its first tokens (`truncate`). `template_options` are passed to the template
    (`enable_thinking = false`); a day among them is what templates see as today's (`template_date.py`).

    `pictures` is for a student that reads pictures. The template writes one marker per picture, which becomes
    as many placeholder ids as the picture has in the model. A placeholder's text in a message stays text.
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
        pictures: PictureReader | None = None,
    ) -> None:
        bound_chat_templates()
        self.tokenizer, self.pictures = tokenizer, pictures
        self._context, self._reserve = context, reserve
        self._limit = min(max_prompt or context, context - reserve)
        self._truncate = truncate
        self._template_options = dict(template_options or {})
        self._day = self._template_options.pop(NOW, None)
        self._special_ids = special_ids(tokenizer)
        self._ready: dict[str, tuple[Prompt, np.ndarray]] = {}
        """By key: prompts that `ahead` has rendered."""

    @property
    def context(self) -> int:
        """The maximum length of a rollout in tokens."""
        return self._context

    @cached_property
    def turn_end(self) -> int | None:
        """The id that ends an assistant's turn in a chat."""
        return turn_end(self.tokenizer, {**self._template_options, NOW: self._day})

    def render(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None) -> np.ndarray:
        """int32 [T]: the tokens of this prompt, up to where the student's answer starts.

        `tools` are function schemas for the template; without them the row's own `tools` column is used.
        """
        ready = self._ready.get(prompt.key)
        if ready is not None and ready[0] is prompt and tools is None:
            return ready[1]
        media = self._media(prompt.key, prompt.messages)
        if prompt.text is not None:
            ids = self._tokenize(prompt.key, self._with_literals(prompt.text), special=True)
        else:
            tools = shown_tools(prompt, tools)
            text = self._apply_template(prompt.key, prompt.messages, tools=tools, generate=True)
            ids = self._tokenize(prompt.key, self._expanded(prompt.key, text, media), special=False)
        if len(ids) == 0:
            raise DataError(f"prompt {prompt.key} (row {prompt.ordinal}) renders to no tokens at all")
        limit = self._limit_of(prompt)
        if len(ids) <= limit:
            return ids
        if self._truncate and limit > 0 and not media:  # a prompt with pictures is never cut
            return ids[-limit:]
        if limit < self._context - self._reserve:
            why = "data.max_prompt_tokens is" if limit == self._limit else "its teacher has room for"
            raise DataError(
                f"prompt {prompt.key} (row {prompt.ordinal}) has {len(ids)} tokens; {why} {limit}"
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
        if not chats or self.pictures is not None or not has_template(self.tokenizer, self._template_options):
            return
        try:
            with within(), on_day(self._day):
                texts = self.tokenizer.apply_chat_template(
                    [[_without_nulls(message) for message in prompt.messages] for prompt in chats],
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._template_options,
                )
            rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        except Exception:  # one prompt cannot be rendered; `render` will say which
            return
        for prompt, ids in zip(chats, rows, strict=True):
            if 0 < len(ids) <= self._limit_of(prompt):
                self._ready[prompt.key] = (prompt, np.asarray(ids, dtype=np.int32))

    def _limit_of(self, prompt: Prompt) -> int:
        return self._limit if prompt.max_tokens is None else min(self._limit, prompt.max_tokens)

    def after_turn(
        self,
        key: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        ended: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> np.ndarray:
        """int32 [T]: the tokens between the student's turn and its next one, with `messages` in between.

        `ended`: the student wrote its own end-of-turn token, so the template's is left out; the rest of the
        separator stays. `tools`: the schemas that the prompt showed, because a tokenizer may have another
        template for chats with tools. Method: render a conversation in which the assistant's message is a
        marker, and take everything after the marker. The tokens of the turn itself are never changed.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}, *messages]
        media = self._media(key, messages)
        text = self._apply_template(key, chat, tools=tools or None, generate=True)
        if _MARKER not in text:
            raise DataError(
                f"prompt {key}: the chat template leaves out what the assistant says before {messages[0].get('role')} messages"
            )
        ids = self._tokenize(key, self._expanded(key, text.rpartition(_MARKER)[2], media), special=False)
        if ended and len(ids) and int(ids[0]) in self._special_ids:
            ids = ids[1:]
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text without special tokens, for display, rewards and tool parsers."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def _apply_template(
        self, key: str, messages: Sequence[Mapping[str, Any]], *, tools: Any, generate: bool
    ) -> str:
        if not has_template(self.tokenizer, self._template_options):
            raise DataError(
                f"prompt {key} is a chat, but the student's tokenizer has no chat template; "
                "give rows a plain `prompt`, or use an instruction-tuned student"
            )
        try:
            with within(), on_day(self._day):
                return self.tokenizer.apply_chat_template(
                    [self._without_literals(_without_nulls(message)) for message in messages],
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=generate,
                    **self._template_options,
                )
        except Exception as error:  # a template is a program: it may raise anything
            raise DataError(f"prompt {key} cannot be rendered by the chat template: {error}") from error

    def _tokenize(self, key: str, text: str, *, special: bool) -> np.ndarray:
        try:
            ids: list[int] = []
            for i, piece in enumerate(self._pieces(text)):
                ids += self.tokenizer(piece, add_special_tokens=special and i == 0)["input_ids"]
        except Exception as error:
            raise DataError(f"prompt {key} cannot be tokenized: {error}") from error
        return np.asarray(ids, dtype=np.int32)

    def _media(self, key: str, messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        media = hashes_in(messages)
        if media and self.pictures is None:
            raise DataError(f"prompt {key} has {len(media)} picture(s), and the student reads text only")
        return media

    @property
    def _placeholders(self) -> tuple[str, ...]:
        return () if self.pictures is None else self.pictures.processor.placeholder_texts

    def _with_literals(self, text: str) -> str:
        for i, literal in enumerate(self._placeholders):
            text = text.replace(literal, _LITERAL.format(i))
        return text

    def _without_literals(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with placeholders in its text hidden from the tokenizer."""
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._with_literals(content)}
        if isinstance(content, list):
            parts = [
                {**part, "text": self._with_literals(part["text"])} if "text" in part else {"type": "image"}
                for part in content
            ]
            return {**message, "content": parts}
        return dict(message)

    def _expanded(self, key: str, text: str, media: tuple[str, ...]) -> str:
        """The template's text with each marker replaced by the placeholders of its picture."""
        if self.pictures is None:
            return text
        processor = self.pictures.processor
        pieces = text.split(processor.image_token)
        if len(pieces) != len(media) + 1:
            raise DataError(
                f"prompt {key} has {len(media)} picture(s), and the chat template writes {processor.image_token} "
                f"{len(pieces) - 1} times; expected once per picture"
            )
        shown = [processor.text_of(self.pictures.size(name)) for name in media]
        return "".join(piece + one for piece, one in zip(pieces, (*shown, ""), strict=True))

    def _pieces(self, text: str) -> list[str]:
        """Texts to be tokenized one by one, so that no placeholder is read in a literal one."""
        pieces = [text]
        for i, literal in enumerate(self._placeholders):
            cut = [one.split(_LITERAL.format(i)) for one in pieces]
            pieces = []
            for parts in cut:
                for j, part in enumerate(parts):
                    # The literal's first character ends one piece, the rest of it starts the next.
                    pieces.append(
                        (literal[1:] if j else "") + part + (literal[:1] if j + 1 < len(parts) else "")
                    )
        return pieces


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: `'tool_calls' in message` is true of a null too. New releases of
    transformers do the same."""
    return {name: value for name, value in message.items() if value is not None}


def shown_tools(
    prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None = None
) -> Sequence[Mapping[str, Any]] | None:
    """The function schemas that a prompt shows: the given ones, else those of the row; None: no tools."""
    return tools or prompt.columns.get("tools") or None


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of all special tokens. `all_special_ids` lacks those without a name, such as Gemma 3's `<end_of_turn>`."""
    try:
        added = tokenizer.added_tokens_decoder
    except NotImplementedError:  # the tokenizers of mistral_common do not offer this table
        added = {}
    return {int(number) for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)


def has_template(tokenizer: Any, template_options: Mapping[str, Any]) -> bool:
    """Whether chats can be rendered: the tokenizer has a template, or the recipe gives one."""
    return bool(getattr(tokenizer, "chat_template", None) or template_options.get("chat_template"))


def turn_end(tokenizer: Any, template_options: Mapping[str, Any] | None = None) -> int | None:
    """The id that ends an assistant's turn: the special token that the chat template writes after it, or eos."""
    eos = None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
    options = dict(template_options or {})
    if not has_template(tokenizer, options):
        return eos
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}]
    try:
        bound_chat_templates()
        with within(), on_day(options.pop(NOW, None)):
            text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    except Exception:  # a template is a program: it may raise anything
        return eos
    _, shown, after = str(text).rpartition(_MARKER)
    written = tokenizer(after if shown else "", add_special_tokens=False)["input_ids"]
    special = special_ids(tokenizer)
    return next((int(one) for one in written if one in special), eos)


def answer_end(tokenizer: Any, stop_ids: Sequence[int], written: int | None = None) -> int:
    """The id with which an answer ends that the student did not write itself: a given one, or one to be taught.

    `written`: in a chat, what its template writes after a turn (`turn_end`), taken if generation stops at it.
    Else, and after plain text, the tokenizer's eos, or one of `stop_ids`.
    """
    own = tokenizer.eos_token_id
    if written is not None and written in stop_ids:
        return int(written)
    return int(own) if own in stop_ids or not stop_ids else int(stop_ids[0])
