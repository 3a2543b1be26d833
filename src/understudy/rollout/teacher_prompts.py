"""Prompts of their own that teachers read: `teachers.NAME.prompt` and `teachers.NAME.prompt_column`.

    row ──template or column──> text or messages ──chat template──> ids ──ScoreRef.after──> request

A template may also show what is known only after the rollout, as `session` (`SessionFacts`).

The student answers the row's own prompt. The teacher reads another one, which may show the answer, feedback or
a demonstration, and then the student's tokens, id by id. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import numpy as np

from understudy.errors import ConfigError, DataError
from understudy.media.pictures import usable_hashes
from understudy.rollout.agents.registry import Schemas
from understudy.rollout.dataset import checked_messages, content_of
from understudy.rollout.render import Renderer
from understudy.rollout.sources import Row
from understudy.types.prompt import Prompt
from understudy.types.references import ScoreRef
from understudy.types.usable_ids import UsableIds

Content = str | Sequence[Mapping[str, Any]]
"""Plain text, or chat messages."""
_CONTENT = ("prompt", "messages")
SESSION = "session"
"""The name of the session's facts in a template."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a template sees as `session`: the attempt that the teacher scores."""

    text: str = ""
    """What the student wrote in its last turn."""
    reward: float | None = 0.0
    feedback: str = ""
    """What the reward function or the agent loop said about it."""
    solution: str | None = ""
    """The last turn of another session of the same prompt that solved it; None if none did."""

    @property
    def known(self) -> dict[str, Any]:
        """Facts by name; one that is None is not defined in a template."""
        facts = {
            "text": self.text,
            "reward": self.reward,
            "feedback": self.feedback,
            "solution": self.solution,
        }
        return {name: value for name, value in facts.items() if value is not None}


def _session_facts(tree: jinja2.nodes.Template) -> set[str]:
    """The names of `session`'s facts that a template uses; all of them if it uses `session` in another way."""
    names = set(SessionFacts.__dataclass_fields__)
    read = [
        node.attr
        for node in tree.find_all(jinja2.nodes.Getattr)
        if isinstance(node.node, jinja2.nodes.Name) and node.node.name == SESSION
    ]
    uses = sum(one.name == SESSION for one in tree.find_all(jinja2.nodes.Name))
    return set(read) if uses == len(read) and names.issuperset(read) else names


class TeacherPrompt:
    """The prompt of one teacher, as a function of a row. Immutable."""

    def __init__(
        self, teacher: str, prompt: str | Sequence[Mapping[str, str]] | None, column: str | None = None
    ) -> None:
        """`prompt` or `column`, as in the recipe. Raises `ConfigError` for a template that is not Jinja."""
        self._place = f"teachers.{teacher}.prompt"
        self._column = column
        self._template: jinja2.Template | list[tuple[str, jinja2.Template]] | None = None
        self.session_facts: set[str] = set()
        """The facts of the session that the prompt shows (`SessionFacts`)."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        try:
            if isinstance(prompt, str):
                self._template = environment.from_string(prompt)
            elif prompt is not None:
                self._template = [(one["role"], environment.from_string(one["content"])) for one in prompt]
            parts = [prompt] if isinstance(prompt, str) else [one["content"] for one in prompt or ()]
            for part in parts:
                self.session_facts |= _session_facts(environment.parse(part))
        except jinja2.TemplateError as error:
            raise ConfigError(f"{self._place} is not a Jinja template: {error}") from None

    def of_row(self, row: Row) -> Row:
        """The row with the teacher's prompt in place of its own; raises `DataError` if it cannot be made."""
        content = self._content(row, content_of(row))
        others = {name: value for name, value in row.items() if name not in _CONTENT}
        return {**others, "prompt" if isinstance(content, str) else "messages": content}

    def of(self, prompt: Prompt, session: SessionFacts = SessionFacts()) -> Prompt:  # noqa: B008 - immutable
        """The same for a prompt instance and one session of it."""
        own = prompt.messages if prompt.text is None else prompt.text
        columns = {**prompt.columns, "data_source": prompt.data_source or None}
        content = self._content(columns, own, session)
        if isinstance(content, str):
            return replace(prompt, text=content, messages=(), max_tokens=None)
        return replace(prompt, text=None, messages=tuple(content), max_tokens=None)

    def _content(
        self,
        columns: Mapping[str, Any],
        own: Content,
        session: SessionFacts = SessionFacts(),  # noqa: B008
    ) -> Content:
        if self._column is not None:
            return self._in_place(self._of_column(columns, self._column), own)
        # A column that other rows have and this one lacks is null in parquet. It counts as missing here too.
        known = {name: value for name, value in columns.items() if value is not None and name not in _CONTENT}
        known["prompt"] = own if isinstance(own, str) else (_last_user(own) or {}).get("content", "")
        if not isinstance(own, str):
            known["messages"] = [dict(message) for message in own]
        if self.session_facts:
            known[SESSION] = session.known
        template = self._template
        try:
            if isinstance(template, list):
                return [{"role": role, "content": one.render(known)} for role, one in template]
            assert template is not None
            return self._in_place(template.render(known), own)
        except DataError:
            raise
        except jinja2.UndefinedError as error:
            raise DataError(
                f"{self._place}: {error.message}; the row has {', '.join(sorted(known))}. Add the column, or test "
                "for it ({% if … is defined %})"
            ) from None
        except Exception as error:  # a template is a program: it may raise anything
            raise DataError(f"{self._place} cannot be rendered: {type(error).__name__}: {error}") from None

    def _of_column(self, columns: Mapping[str, Any], column: str) -> Content:
        value = columns.get(column)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, Sequence) and value and not isinstance(value, str):
            messages: Content = checked_messages(f"{self._place}_column = {column!r}", value)
            return messages
        came = "is missing or empty" if not value else f"is a {type(value).__name__}"
        raise DataError(
            f"{self._place}_column = {column!r}: the column {came}; expected text or a list of messages"
        )

    def _in_place(self, content: Content, own: Content) -> Content:
        """Text takes the place of a plain prompt, or of the content of a chat's last user message."""
        if not isinstance(content, str) or isinstance(own, str):
            return content
        last = _last_user(own)
        if last is None:
            raise DataError(
                f"{self._place} is text, which takes the place of the last user message, and the row's chat has none; "
                "give a list of messages"
            )
        return [{**one, "content": content} if one is last else one for one in own]


def _last_user(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((one for one in reversed(messages) if one.get("role") == "user"), None)


class TeacherPrompts:
    """Gives scoring requests the prompt of the teacher that is asked. Used by produce on the event loop.

    `renderer` is the student's, without its length limits: a teacher has its own, checked per request.
    `renderers` are those of teachers with another tokenizer, by name; they read every prompt by their own template.
    """

    def __init__(
        self,
        own: Mapping[str, TeacherPrompt],
        renderer: Renderer,
        schemas: Schemas,
        usable: UsableIds | None = None,
        renderers: Mapping[str, Renderer] | None = None,
    ) -> None:
        self._own, self._renderer, self._schemas, self._usable = own, renderer, schemas, usable
        self._renderers = dict(renderers or {})

    @property
    def any(self) -> bool:
        return bool(self._own or self._renderers)

    def text(self, teacher: str, ids: np.ndarray) -> str:
        """The ids that a teacher read, as text."""
        tokenizer = self._renderers.get(teacher, self._renderer).tokenizer
        return str(tokenizer.decode(ids.tolist()))

    @property
    def session_facts(self) -> set[str]:
        """The facts of a session that any teacher's prompt shows."""
        return {name for one in self._own.values() for name in one.session_facts}

    def shows_session(self, teacher: str) -> bool:
        """Whether this teacher's prompt depends on the session, not on the row alone."""
        return teacher in self._own and bool(self._own[teacher].session_facts)

    def request(
        self, teacher: str, prompt: Prompt, item: ScoreRef, session: SessionFacts | None = None
    ) -> ScoreRef:
        """The request as this teacher reads it; raises `DataError` if its prompt cannot be made."""
        ids = self.ids(teacher, prompt, session)
        if ids is None:
            return item
        if not item.key.endswith("_0"):
            raise DataError(
                f"row {item.key} is not the first output of its session, so it need not begin with the row's prompt, and "
                f"teachers.{teacher} reads a prompt of its own in place of that; use an agent loop with one output, or leave "
                "the teacher's prompt out"
            )
        return item.after(ids)

    def ids(self, teacher: str, prompt: Prompt, session: SessionFacts | None = None) -> np.ndarray | None:
        """int32: the tokens of the teacher's own prompt for this row, by its own tokenizer if it has another; None if
        it reads the student's."""
        own, renderer = self._own.get(teacher), self._renderers.get(teacher)
        if own is None and renderer is None:
            return None
        if usable_hashes(prompt.messages):
            raise DataError(
                f"prompt {prompt.key} has pictures, and teachers.{teacher} reads a prompt of its own, which holds none; route "
                "rows with pictures to a teacher that reads the student's prompt"
            )
        seen = own.of(prompt, session or SessionFacts()) if own else replace(prompt, max_tokens=None)
        ids = (renderer or self._renderer).render(seen, tools=self._schemas(prompt))
        if self._usable is not None and renderer is None:
            self._usable.check(ids, f"prompt {prompt.key} of teachers.{teacher}")
        return ids
