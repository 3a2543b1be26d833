"""A tokenizer's token→id map, read from tokenizer.json, and whether two of them agree.

Only the map and the special ids matter: token ids travel, never text. Files may differ in layout, normaliser or
chat template, and a model may have more embedding rows than its tokenizer has tokens (padding to a round number).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.errors import TeacherError

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    ids: Mapping[str, int]
    special: Mapping[str, int | None] = field(default_factory=dict)
    """bos_token, eos_token, pad_token, unk_token → id, None where there is none."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the sorted (id, token) pairs and the special ids."""
        total = hashlib.sha256()
        for token, number in sorted(self.ids.items(), key=lambda pair: (pair[1], pair[0])):
            total.update(f"{number}\t{token}\n".encode("utf-8", "surrogatepass"))
        total.update(json.dumps(dict(sorted(self.special.items()))).encode())
        return total.hexdigest()

    @classmethod
    def load(cls, folder: str | Path) -> Vocabulary:
        """Read tokenizer.json and tokenizer_config.json without building a tokenizer."""
        folder = Path(folder)
        try:
            tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise TeacherError(f"no readable tokenizer.json in {folder}: {error}") from error
        ids = _model_vocabulary(tokenizer.get("model") or {})
        for token in tokenizer.get("added_tokens") or ():
            ids[token["content"]] = token["id"]
        return cls(ids, _special_ids(folder, ids))


def _model_vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    vocab = model.get("vocab") or {}
    if isinstance(vocab, dict):  # BPE, WordPiece, WordLevel
        return dict(vocab)
    return {entry[0]: number for number, entry in enumerate(vocab)}  # Unigram: [[token, score], …]


def _special_ids(folder: Path, ids: Mapping[str, int]) -> dict[str, int | None]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except OSError:
        config = {}
    except ValueError as error:
        raise TeacherError(f"unreadable tokenizer_config.json in {folder}: {error}") from error
    special: dict[str, int | None] = {}
    for name in SPECIAL:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        special[name] = None if content is None else ids.get(content)
    return special


def differences(student: Vocabulary, teacher: Vocabulary, show: int = 5) -> list[str]:
    """The first differing tokens, in words; empty when the maps agree."""
    told: list[str] = []
    for token, number in sorted(student.ids.items(), key=lambda pair: pair[1]):
        other = teacher.ids.get(token)
        if other != number:
            told.append(
                f"{token!r} is {number} for the student and {'missing' if other is None else other} for the teacher"
            )
            if len(told) == show:
                return told
    known = student.ids
    for token, number in sorted(teacher.ids.items(), key=lambda pair: pair[1]):
        if token not in known:
            told.append(f"{token!r} is missing for the student and {number} for the teacher")
            if len(told) == show:
                return told
    for name in SPECIAL:
        ours, theirs = student.special.get(name), teacher.special.get(name)
        if ours != theirs:
            told.append(f"{name} is {ours} for the student and {theirs} for the teacher")
    return told[:show]
