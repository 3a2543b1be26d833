"""Prompts from jsonl or parquet files, or from a plain list of dicts.

A row needs `prompt` (plain text, used as it stands; a list of messages is taken as `messages`) or `messages` (a
chat). `data_source` routes it to its teacher, and every other column (`answer`, `tools`, `agent`, …) is kept as it
came. Every row is checked here, before anything expensive starts; the module needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from understudy.errors import DataError
from understudy.types.prompt import Prompt

Row = Mapping[str, Any]
_CONTENT = {"prompt", "messages", "data_source"}
"""Columns that become fields of a `Prompt`; the rest stay columns."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Checked rows, in file order."""

    rows: Sequence[Row]
    fingerprint: str
    """sha256 of the content: a resumed run refuses another dataset by it."""
    source: str
    """Where the rows came from, for messages."""

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, ordinal: int, *, key: str, epoch: int) -> Prompt:
        """The row at `ordinal` as a prompt instance."""
        row = self.rows[ordinal]
        content = row.get("messages") or row.get("prompt")
        chat = not isinstance(content, str)
        return Prompt(
            key=key,
            ordinal=ordinal,
            epoch=epoch,
            data_source=row.get("data_source") or "",
            messages=tuple(content) if chat and content else (),
            text=None if chat else content,
            columns={name: value for name, value in row.items() if name not in _CONTENT},
        )


def load_dataset(source: str | Path | Sequence[str | Path] | Sequence[Row]) -> Dataset:
    """Reads and checks a file, several files one after another, or rows given as they are."""
    if isinstance(source, (str, Path)):
        source = [source]
    if all(isinstance(item, Mapping) for item in source):
        rows = [(f"data[{i}]", item) for i, item in enumerate(source)]
        digest = sha256()
        for _, row in rows:
            digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False, default=repr).encode() + b"\n")
        return _checked(rows, digest.hexdigest(), "the list of rows given")
    paths = [Path(str(item)) for item in source]
    digest = sha256()
    rows = []
    for path in paths:
        rows.extend(_read(path))
        digest.update(_file_digest(path))
    return _checked(rows, digest.hexdigest(), ", ".join(map(str, paths)))


def _read(path: Path) -> Iterable[tuple[str, Any]]:
    """(place, row) pairs; a place names the file and the line."""
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"dataset {path} {kind}; expected a .jsonl or .parquet file (data.train, data.eval)")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix in {".jsonl", ".ndjson", ".json"}:
        return _read_jsonl(path)
    raise DataError(f"dataset {path} ends in {path.suffix or 'nothing'!r}; expected .jsonl or .parquet")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                yield place, json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{place} is not JSON: {error.msg} at column {error.colno}; expected one object per line"
                ) from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"dataset {path} is not a readable parquet file: {error}") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", {name: value for name, value in row.items() if value is not None}


def _file_digest(path: Path) -> bytes:
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _checked(places: Iterable[tuple[str, Any]], fingerprint: str, source: str) -> Dataset:
    rows = []
    for place, row in places:
        _check_row(place, row)
        rows.append(row)
    if not rows:
        raise DataError(f"dataset {source} is empty; expected at least one row with `prompt` or `messages`")
    return Dataset(rows, fingerprint, source)


def _check_row(place: str, row: Any) -> None:
    if not isinstance(row, Mapping):
        raise DataError(f"{place} is a {type(row).__name__}; expected an object with `prompt` or `messages`")
    content = row.get("messages") or row.get("prompt")
    if not content:
        columns = ", ".join(sorted(map(str, row))) or "none"
        raise DataError(
            f"{place} has no prompt (columns: {columns}); give it `prompt` (text) or `messages` (a chat)"
        )
    if not isinstance(content, str):
        _check_messages(place, content)
    if not isinstance(row.get("data_source", ""), str | None):
        raise DataError(f"{place}: data_source is {row['data_source']!r}; expected text")


def _check_messages(place: str, messages: Any) -> None:
    if not isinstance(messages, Sequence):
        raise DataError(f"{place}: messages is a {type(messages).__name__}; expected a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f'{place}: messages[{i}] is {message!r}; expected an object like {{"role": "user", "content": "…"}}'
            )
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{place} ends with an assistant message, so there is nothing left to answer; drop that message"
        )
