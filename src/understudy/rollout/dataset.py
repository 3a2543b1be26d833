"""Datasets of prompts from jsonl or parquet files, hub datasets, or a list of dicts.

A row needs `prompt` (plain text, used unchanged; a list of messages is treated as `messages`) or `messages`
(a chat). `data_source` routes it to its teacher. Every other column (`answer`, `tools`, `agent`, …) is kept
unchanged. Rows in verl's and TRL's formats work unchanged: of a chat that ends with an assistant message the
student answers what comes before, and that message becomes the column `completion`. Every row is checked
here, before anything expensive starts.

Pictures come in an `images` column or in content parts of messages, and become parts `{"type": "image",
"image": source}` of the messages (`media/pictures.py`). `Dataset.prompt` puts them into the run's store.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from understudy.errors import DataError
from understudy.media.pictures import Pictures
from understudy.rollout.image_parts import IMAGES, NOT_READ, images_of, merged, part_of, with_images
from understudy.rollout.sources import Row, digest_of, expand, read_source
from understudy.types.prompt import Prompt

_CONTENT = {"prompt", "messages", "data_source", *IMAGES}
"""Columns that become fields of a `Prompt`; the rest stay columns."""
VERL_AGENTS = {"single_turn_agent": "single_turn", "tool_agent": "tool"}
"""Names in verl's `agent_name` column → our loops."""
_SHOWN = 60
COMPLETION = "completion"
"""TRL's column of given answers; here also the last message of a chat that ends with an answer."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Checked rows, in file order."""

    rows: Sequence[Row]
    fingerprint: str
    """sha256 of the content; a resumed run compares it and refuses another dataset."""
    source: str
    """Where the rows came from, for messages."""
    places: Sequence[str] = ()
    """The file and line of each row, for messages."""
    pictures: Pictures | None = None
    """Stores the pictures of prompts; None: prompts keep their sources."""
    split_answers: int = 0
    """How many chats ended with the answer that is now their column `completion`."""
    limits: Sequence[int | None] = ()
    """The most tokens of each row's prompt, which is cut to them; empty: as many as the student's context
    allows."""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, ordinal: int) -> str:
        return self.places[ordinal] if self.places else f"row {ordinal + 1}"

    def only(self, ordinals: Sequence[int]) -> Dataset:
        """A dataset of these rows only, with its own fingerprint."""
        if len(ordinals) == len(self.rows):
            return self
        chosen = sha256(f"{self.fingerprint} {list(ordinals)}".encode()).hexdigest()
        return replace(
            self,
            rows=[self.rows[i] for i in ordinals],
            places=[self.place(i) for i in ordinals],
            limits=[self.limits[i] for i in ordinals] if self.limits else (),
            fingerprint=chosen,
        )

    def cut_to(self, limits: Sequence[int | None]) -> Dataset:
        """The same rows, with prompts of at most this many tokens."""
        return replace(self, limits=limits)

    def prompt(self, ordinal: int, *, key: str, epoch: int) -> Prompt:
        """The row at `ordinal` as a prompt instance."""
        row = self.rows[ordinal]
        content = content_of(row)
        chat = not isinstance(content, str)
        if chat and self.pictures is not None:
            content = self.pictures.stored(content)
        return Prompt(
            key=key,
            ordinal=ordinal,
            epoch=epoch,
            data_source=row.get("data_source") or "",
            messages=tuple(content) if chat and content else (),
            text=None if chat else content,
            columns={name: value for name, value in row.items() if name not in _CONTENT},
            max_tokens=self.limits[ordinal] if self.limits else None,
        )

    def storing(self, pictures: Pictures | None) -> Dataset:
        """The same dataset, with a store for the pictures of its prompts."""
        return replace(self, pictures=pictures)

    def with_pictures(self) -> list[int]:
        """The rows that have pictures."""
        return [i for i, row in enumerate(self.rows) if picture_sources(row)]


def picture_sources(row: Row) -> list[Mapping[str, Any]]:
    """The picture parts of a checked row."""
    content = content_of(row)
    if isinstance(content, str):
        return []
    parts = [message.get("content") for message in content]
    return [part for own in parts if isinstance(own, list) for part in own if part.get("type") == "image"]


def content_of(row: Row) -> Any:
    """Text, or a list of messages."""
    return row.get("messages") or row.get("prompt")


def load_dataset(
    source: str | Path | Sequence[str | Path] | Sequence[Row], key: str = "data.train"
) -> Dataset:
    """Reads and checks a file, several sources in order, or rows given as dicts. `key` is the recipe key that
    named them, for messages."""
    if isinstance(source, (str, Path)):
        source = [source]
    if source and all(isinstance(item, Mapping) for item in source):
        rows = [(f"data[{i}]", item) for i, item in enumerate(source)]
        digest = digest_of(row for _, row in rows)
        return _checked(rows, digest.hex(), "the list of rows given", [Path.cwd()] * len(rows))
    names = [name for item in source for name in _expanded(str(item), key)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{key} names {twice} twice; name each file once")
    whole = sha256()
    rows = []
    folders: list[Path] = []
    for name in names:
        found, digest = read_source(name, key)
        rows += found
        folders += [Path(name).absolute().parent] * len(found)
        whole.update(digest)
    return _checked(rows, whole.hexdigest(), ", ".join(names), folders)


def _expanded(source: str, key: str) -> list[str]:
    names = expand(source)
    if not names:
        raise DataError(f"{key}: no file matches {source}; a glob is looked up beside the recipe")
    return names


def _checked(
    places: Sequence[tuple[str, Any]], fingerprint: str, source: str, folders: Sequence[Path]
) -> Dataset:
    """`folders`: what the paths of each row's pictures are relative to."""
    rows, names, split = [], [], 0
    for (place, row), folder in zip(places, folders, strict=True):
        try:
            rows.append(_checked_row(place, row, folder))
        except RecursionError:
            raise DataError(f"{place} is nested too deeply to be read") from None
        names.append(place)
        split += not row.get(COMPLETION) and bool(rows[-1].get(COMPLETION))
    if not rows:
        raise DataError(f"dataset {source} is empty; expected at least one row with `prompt` or `messages`")
    return Dataset(rows, fingerprint, source, names, split_answers=split)


def _checked_row(place: str, row: Any, folder: Path) -> Row:
    """The checked row, with text parts joined, pictures as parts, and verl's `agent_name` as `agent`."""
    if not isinstance(row, Mapping):
        raise DataError(f"{place} is a {type(row).__name__}; expected an object with `prompt` or `messages`")
    content = content_of(row)
    if not content:
        if empty := next((column for column in ("messages", "prompt") if row.get(column) is not None), None):
            raise DataError(f"{place}: `{empty}` is empty; the student needs something to answer")
        columns = ", ".join(sorted(map(str, row))) or "none"
        raise DataError(
            f"{place} has no prompt (columns: {columns}); give it `prompt` (text) or `messages` (a chat)"
        )
    if row.get("messages") and row.get("prompt"):
        raise DataError(
            f"{place} has both `prompt` and `messages`; keep the one that the student is to answer"
        )
    if isinstance(row.get("messages"), str):
        raise DataError(
            f"{place}: messages is a string; expected a list of messages; text that is used unchanged belongs to `prompt`"
        )
    if name := next((name for name in NOT_READ if row.get(name)), None):
        raise DataError(
            f"{place} has {name} (column `{name}`); only text and images are read, so drop the column"
        )
    if isinstance(row.get("tools"), str) and not isinstance(content, str):
        row = {**row, "tools": _tools_of_text(place, row["tools"])}
    images = images_of(place, row)
    if (where := _lone_surrogate(row)) is not None:
        raise DataError(
            f"{place}: {where} holds half of a character (a lone surrogate such as \\ud83d); write it whole, or remove it"
        )
    changes: dict[str, Any] = {}
    if isinstance(content, str) and images:
        raise DataError(
            f'{place} has images beside a plain `prompt`; give it `messages`: [{{"role": "user", "content": "<image>…"}}]'
        )
    if not isinstance(content, str):
        _check_tools(place, row.get("tools"))
        asked, answer = _split_answer(place, content, row)
        if answer is not None:
            changes[COMPLETION] = answer
        column = "messages" if row.get("messages") else "prompt"
        messages = checked_messages(place, asked, images, folder, column)
        if messages is not content:
            changes[column] = messages
    if not isinstance(row.get("data_source", ""), str | None):
        raise DataError(f"{place}: data_source is {row['data_source']!r}; expected text")
    agent = _agent_of(place, row)
    if agent is not None and agent != row.get("agent"):
        changes["agent"] = agent
    return {**row, **changes} if changes else row


_TOOLS = (
    "expected a list of function schemas or of names of the agent loop's tools, or that list as JSON text"
)


def _tools_of_text(place: str, text: str) -> Any:
    """Tools that a data file holds as JSON text, in whole or each."""
    try:
        tools = json.loads(text) if text.strip() else None
        if isinstance(tools, list):
            tools = [
                json.loads(one) if isinstance(one, str) and one.startswith("{") else one for one in tools
            ]
    except (ValueError, RecursionError) as error:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        raise DataError(f"{place}: tools is the text {shown!r}, no JSON ({error}); {_TOOLS}") from None
    return tools


def _check_tools(place: str, tools: Any) -> None:
    if not tools:
        return
    if not isinstance(tools, list | tuple):
        raise DataError(f"{place}: tools is a {type(tools).__name__}; {_TOOLS}")
    for i, one in enumerate(tools):
        if not isinstance(one, Mapping | str):
            raise DataError(f"{place}: tools[{i}] is {one!r}; {_TOOLS}")


def _split_answer(place: str, messages: Any, row: Row) -> tuple[Any, str | None]:
    """A chat without the answer it ends with, and that answer; None if it ends with a question."""
    last = messages[-1] if isinstance(messages, list | tuple) and len(messages) > 1 else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return messages, None
    if row.get(COMPLETION):
        raise DataError(
            f"{place} ends with an assistant message and has a `{COMPLETION}` too; keep one of the two answers"
        )
    try:
        return messages[:-1], answer_text([last])
    except ValueError as error:
        raise DataError(
            f"{place} ends with an assistant message that is not an answer in text ({error}); drop that message"
        ) from None


def answer_text(value: Any) -> str:
    """A given answer as text: a text, or a list with one assistant message. `ValueError` says what came
    instead."""
    if isinstance(value, list | tuple) and value:
        if len(value) > 1:
            raise ValueError(f"{len(value)} messages, expected one")
        message = value[0]
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            raise ValueError("a list without an assistant message")
        if message.get("tool_calls"):
            raise ValueError("a message with tool calls")
        value = message.get("content")
        if isinstance(value, list | tuple):
            parts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
            if not all(isinstance(part, str) for part in parts):
                raise ValueError("a message that is not text alone")
            value = "".join(map(str, parts))
    if not value:
        raise ValueError("missing or empty")
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__}")
    return value


def _agent_of(place: str, row: Row) -> str | None:
    for column in ("agent", "agent_name"):
        name = row.get(column)
        if name is None or name == "":
            continue
        if not isinstance(name, str):
            raise DataError(f"{place}: {column} is {name!r}; expected the name of an agent loop")
        return VERL_AGENTS.get(name, name) if column == "agent_name" else name
    return None


def checked_messages(
    place: str,
    messages: Any,
    images: Sequence[Any] = (),
    folder: Path | None = None,
    column: str = "messages",
) -> Any:
    """The checked messages, with content in text parts joined into one text. A message with pictures has a
    list of parts. `images`: the row's own column, whose pictures stand where the messages say, or before the
    first user message. Paths are relative to `folder`. `column`: where they come from, for errors."""
    if not isinstance(messages, Sequence):
        text = "text or " if column == "prompt" else ""
        raise DataError(
            f"{place}: {column} is a {type(messages).__name__}; expected {text}a list of messages"
        )
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f'{place}: {column}[{i}] is {message!r}; expected an object like {{"role": "user", "content": "…"}}'
            )
        content = message.get("content")
        if content is None and message["role"] != "assistant":  # a tool call has none
            raise DataError(
                f"{place}: {column}[{i}] has no content (its keys: {', '.join(map(str, message))}); "
                'expected an object like {"role": "user", "content": "…"}'
            )
        if isinstance(content, str | None):
            plain.append(message)
        elif isinstance(content, Sequence):
            where = f"{place}: {column}[{i}].content"
            parts = [part_of(f"{where}[{j}]", part, folder) for j, part in enumerate(content)]
            if all(isinstance(part, str) for part in parts):
                plain.append({**message, "content": "".join(map(str, parts))})
            else:
                plain.append({**message, "content": merged(parts)})
        else:
            raise DataError(
                f"{place}: {column}[{i}].content is a {type(content).__name__}; expected text or a list of text parts"
            )
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{place} ends with an assistant message, so there is nothing left to answer; drop that message"
        )
    plain = with_images(place, plain, images, folder)
    return messages if all(a is b for a, b in zip(plain, messages, strict=True)) else plain


def _lone_surrogate(value: Any, where: str = "") -> str | None:
    """The path of a text in the row that UTF-8 cannot encode (JSON can hold a lone surrogate); None if all
    can be."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return where
        return None
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        inner = ((f"{where}.{name}" if where else str(name), one) for name, one in value.items())
    elif isinstance(value, list | tuple):
        inner = ((f"{where}[{i}]", one) for i, one in enumerate(value))
    return next((found for name, one in inner if (found := _lone_surrogate(one, name)) is not None), None)
