"""Readers of dataset rows: jsonl and parquet files, globs, hub datasets, `datasets.Dataset` objects.

Each source yields (place, row) pairs, where the place names file and line for messages. Each source also
gives a digest, by which a resumed run checks that it reads the same rows. Imports no torch.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from understudy.errors import DataError
from understudy.media.pictures import portable_row

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_ENCODING = "utf-8-sig"
"""UTF-8, with or without the mark that programs on Windows begin a file with."""
_BEGINNING = 4096
"""How much of a file is read to see whether it begins as a list."""
_HUB = re.compile(
    r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.+-]+))?(@(?P<revision>[\w.-]+))?(:(?P<split>[^/]+))?"
)
_EXPECTED = "expected a .jsonl, .json or .parquet file, a glob that matches some, or a hub dataset like 'org/name:train'"


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset of the hub: `org/name`, `org/name/config`, either with `@revision` and `:split`."""

    name: str
    config: str | None
    revision: str | None
    split: str | None


def hub_dataset(source: str) -> HubDataset | None:
    """The hub dataset that a source names; None if it is a path or looks like a mistyped one."""
    found = _HUB.fullmatch(source)
    if found is None or source.startswith(".") or Path(source).exists():
        return None
    if source.endswith(SUFFIXES) or Path(Path(source).parts[0]).exists():
        return None
    return HubDataset(**found.groupdict())


def expand(source: str) -> list[str]:
    """The files that a glob matches, sorted; any other source unchanged."""
    if not glob.has_magic(source) or Path(source).exists() or hub_dataset(source):
        return [source]
    return sorted(glob.glob(source, recursive=True))


def read_source(source: str, key: str) -> tuple[list[tuple[str, Any]], bytes]:
    """Rows with their places, and a digest of the content; `key` is the recipe key, for errors."""
    hub = hub_dataset(source)
    if hub is not None:
        return _read_hub(source, hub, key)
    path = Path(source)
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        hint = f"; several sources are a list: {json.dumps(source.split(','))}" if "," in source else ""
        raise DataError(f"{key}: dataset {path} {kind}; {_EXPECTED}{hint}")
    if path.suffix not in SUFFIXES:
        raise DataError(f"{key}: dataset {path} ends in {path.suffix or 'nothing'!r}; {_EXPECTED}")
    try:
        if path.suffix == ".parquet":
            rows = list(_read_parquet(path, key))
        else:
            rows = list(_read_list(path, key) if _is_list(path) else _read_jsonl(path, key))
        return rows, _file_digest(path)
    except OSError as error:
        raise DataError(f"{key}: dataset {path} cannot be read ({error.strerror or error})") from None


def _is_list(path: Path) -> bool:
    """Whether a .json file holds one list of rows, as some tools write it."""
    if path.suffix != ".json":
        return False
    with path.open(encoding=_ENCODING, errors="replace") as file:
        return file.read(_BEGINNING).lstrip().startswith("[")


def _read_list(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding=_ENCODING))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{key}: {path} begins as a list but is not readable JSON: {error}") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}, item {number}", row


def _not_utf8(path: Path) -> int:
    """The first line that cannot be decoded: a text file is decoded ahead of the line that is read."""
    whole = path.read_bytes()
    try:
        whole.decode(_ENCODING)
    except UnicodeDecodeError as error:
        return whole.count(b"\n", 0, error.start) + 1
    return 1


def _read_jsonl(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    number = 0
    with path.open(encoding=_ENCODING) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{key}: {path}, line {number} is not JSON: {error.msg} at column {error.colno}; expected one object per line"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{key}: {path}, line {_not_utf8(path)} is not UTF-8 text ({error.reason}); save the file as UTF-8"
            ) from None
        except ValueError as error:  # an integer of more digits than Python reads
            raise DataError(
                f"{key}: {path}, line {number} cannot be read: {str(error).partition(';')[0]}; write the number as text"
            ) from None
        except RecursionError:
            raise DataError(f"{key}: {path}, line {number} is nested too deeply to be read") from None


def _read_parquet(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{key}: dataset {path} is not a readable parquet file: {error}") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", _without_nulls(row)


def _read_hub(source: str, hub: HubDataset, key: str) -> tuple[list[tuple[str, Any]], bytes]:
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f'{key} = {source!r} is not a file on this machine; a hub dataset needs the datasets extra: pip install "understudy[datasets]"'
        )
    if hub.split is None and key != "data.train":
        raise DataError(f"{key} = {source!r}: name the split, for example '{source}:test'")
    datasets: Any = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(hub.name, hub.config, split=hub.split or "train", revision=hub.revision)
    except Exception as error:  # the library, the network and the hub raise different errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{key} = {source!r} cannot be had from the hub: {reason}") from None
    rows = [(f"{source}, row {number}", row) for number, row in enumerate(rows_of(found, key), start=1)]
    return rows, digest_of(row for _, row in rows)


def rows_of(data: Iterable[Any], key: str = "data") -> list[dict[str, Any]]:
    """The rows of a list of dicts or a `datasets.Dataset`, as plain dicts that JSON can encode."""
    if isinstance(data, Mapping):
        if any(isinstance(one, str) or _is_column(one) for one in data.values()):
            raise DataError(
                f'{key} is a dict ({", ".join(map(str, data))}); expected a list of rows: [{{"prompt": "…"}}, …]'
            )
        raise DataError(
            f"{key} holds several splits ({', '.join(map(str, data))}); give one of them, for example dataset['train']"
        )
    rows = []
    for number, row in enumerate(data, start=1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{key}, row {number} is a {type(row).__name__}; expected an object with `prompt` or `messages`"
            )
        plain = {name: _unpacked(value) for name, value in row.items()}
        rows.append(portable_row(_without_nulls(plain), Path.cwd()))
        for name, value in rows[-1].items():
            if (odd := _odd_value(value)) is not None:
                raise DataError(
                    f"{key}, row {number}: column `{name}` holds a {type(odd).__name__}, which a row cannot keep; drop or convert it"
                )
    return rows


def _is_column(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and not isinstance(value[0], Mapping)


def write_rows(data: Iterable[Any], path: Path, key: str = "data") -> None:
    """Writes rows given as objects to a jsonl file that a resumed run can read again."""
    lines = [json.dumps(row, ensure_ascii=True, default=str) + "\n" for row in rows_of(data, key)]
    path.write_text("".join(lines), encoding="utf-8")


def digest_of(rows: Iterable[Any]) -> bytes:
    """A digest of rows that do not come from a file."""
    digest = sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.digest()


def _without_nulls(row: Row) -> dict[str, Any]:
    """The row without null columns, and chats and tools without null entries: columnar formats store a null for
    every column or key that another row has and this one lacks."""
    return {
        str(name): _dense(value) if name == "tools" or _is_chat(value) else value
        for name, value in row.items()
        if value is not None
    }


def _is_chat(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(
        isinstance(one, Mapping) and "role" in one for one in value
    )


def _dense(value: Any) -> Any:
    """The value without the keys of objects that are null, at any depth. A null in a list stays: `enum` may hold one."""
    if isinstance(value, Mapping):
        return {name: _dense(one) for name, one in value.items() if one is not None}
    return [_dense(one) for one in value] if isinstance(value, list | tuple) else value


def _unpacked(value: Any) -> Any:
    """numpy numbers and arrays converted to Python's; other values unchanged."""
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value


def _odd_value(value: Any) -> Any:
    """A value inside `value` that cannot be written as JSON; None if there is none."""
    if value is None or isinstance(value, str | int | float | date | time | Decimal):
        return None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((odd for one in value if (odd := _odd_value(one)) is not None), None)
    return value


def _file_digest(path: Path) -> bytes:
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()
