"""A tokenizer's token→id map, read from its files, and whether two of them agree.

Models exchange token ids, never text. So each id that both models have must stand for the same token. Special
ids (eos, pad, unk), chat templates and the number of embedding rows may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from understudy.errors import TeacherError
from understudy.types.usable_ids import UsableIds

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Vocabulary:
    """The token→id map of one tokenizer and its special ids."""

    ids: Mapping[str, int]
    special: Mapping[str, int | None] = field(default_factory=dict)
    """bos_token, eos_token, pad_token, unk_token → id; None if the tokenizer has none."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the sorted (id, token) pairs and the special ids."""
        total = hashlib.sha256()
        for token, number in sorted(self.ids.items(), key=lambda pair: (pair[1], pair[0])):
            total.update(f"{number}\t{token}\n".encode("utf-8", "surrogatepass"))
        total.update(json.dumps(dict(sorted(self.special.items()))).encode())
        return total.hexdigest()

    def tokens(self, rows: int | None = None) -> Mapping[int, str]:
        """id → token; with `rows`, only of ids that a model with this many embedding rows can produce."""
        if rows is None or max(self._by_id, default=-1) < rows:
            return self._by_id
        return {number: token for number, token in self._by_id.items() if number < rows}

    @cached_property
    def _by_id(self) -> Mapping[int, str]:
        # Kept: a check asks a dozen times, and 150,000 tokens take 0.1 s each time.
        return {number: token for token, number in self.ids.items()}

    def usable(self, rows: int) -> UsableIds:
        """The ids with a token, for a model with this many embedding rows; all rows if no token is known."""
        known = self.tokens(rows)
        if not known:
            return UsableIds(rows)
        limit = max(known) + 1
        return UsableIds(limit, tuple(number for number in range(limit) if number not in known))

    @classmethod
    def load(cls, folder: str | Path) -> Vocabulary:
        """Read tokenizer.json and the files beside it without building a tokenizer."""
        folder = Path(folder)
        try:
            stamps = tuple(_stamp(folder / name) for name in _FILES)
            return _read(folder, stamps)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TeacherError(f"no readable tokenizer.json in {folder}: {error}") from error


_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0


@lru_cache(maxsize=8)
def _read(folder: Path, stamps: tuple[int, ...]) -> Vocabulary:
    """`stamps`: modification times, part of the cache key, so that a changed file is read again."""
    return _parsed(*(_content(folder / name) for name in _FILES))


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() or path.name == _FILES[0] else b"{}"


@lru_cache(maxsize=4)
def _parsed(tokenizer_json: bytes, config_json: bytes, added_json: bytes) -> Vocabulary:
    """By content: student and teachers mostly have the same tokenizer, and 150,000 tokens take half a second."""
    tokenizer = json.loads(tokenizer_json.decode("utf-8"))
    config = dict(json.loads(config_json.decode("utf-8")))
    ids = _model_vocabulary(tokenizer.get("model") or {})
    # Added tokens are listed in up to three places; transformers reads all of them.
    ids.update(dict(json.loads(added_json.decode("utf-8"))))
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        ids[token["content"]] = int(number)
    for token in tokenizer.get("added_tokens") or ():
        ids[token["content"]] = token["id"]
    return Vocabulary(ids, _special_ids(config, ids))


def _model_vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    vocab = model.get("vocab") or {}
    if isinstance(vocab, dict):  # BPE, WordPiece, WordLevel
        return dict(vocab)
    return {entry[0]: number for number, entry in enumerate(vocab)}  # Unigram: [[token, score], …]


def _special_ids(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int | None]:
    special: dict[str, int | None] = {}
    for name in SPECIAL:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        special[name] = None if content is None else ids.get(content)
    return special


def differences(
    student: Vocabulary, other: Vocabulary, rows: tuple[int | None, int | None] = (None, None)
) -> dict[int, tuple[str, str]]:
    """Ids that stand for different tokens in the two models: id → (student's, other's).

    Only ids that both models have are compared; `rows` are their embedding rows.
    """
    if student is other:
        return {}
    theirs = other.tokens(rows[1])
    return {
        number: (token, theirs[number])
        for number, token in sorted(student.tokens(rows[0]).items())
        if number in theirs and theirs[number] != token and other.ids.get(token) != number
    }


def describe_differences(
    differing: Mapping[int, tuple[str, str]], other: str = "teacher", show: int = 3
) -> str:
    """The first differing ids, in words."""
    first = [
        f"id {number} is {ours!r} for the student and {theirs!r} for the {other}"
        for number, (ours, theirs) in list(differing.items())[:show]
    ]
    return "; ".join(first) + (" …" if len(differing) > show else "")
