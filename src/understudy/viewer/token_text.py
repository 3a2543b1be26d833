"""Token ids as text, token by token: the pieces joined give the decoded text exactly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

_BROKEN = "\ufffd"
_CONTEXT = 4
"""Tokens before a token that decide how it is written (a space before a word, half a character)."""


def find_tokenizer(run: Path, model: str | None) -> Path | None:
    """tokenizer.json of the student: kept in the run directory, in the model's folder, or in the hub's cache."""
    places = [run / "kept_rows" / "tokenizer.json"]
    if model:
        places.append(Path(model) / "tokenizer.json")
        home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
        hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
        if model.count("/") == 1 and not model.startswith((".", "/")):
            places += sorted(hub.glob(f"models--{model.replace('/', '--')}/snapshots/*/tokenizer.json"))
    return next((place for place in places if place.is_file()), None)


@lru_cache(maxsize=8)
def _load(path: str, changed: int) -> Any:
    from tokenizers import Tokenizer  # noqa: PLC0415 - 40 ms that a view of curves does not need

    return Tokenizer.from_file(path)


class TokenText:
    """`None` as the path: no tokenizer was found, and tokens are shown as their numbers."""

    def __init__(self, path: Path | None) -> None:
        self._tokenizer = None
        if path is not None:
            try:
                self._tokenizer = _load(str(path), path.stat().st_mtime_ns)
            except Exception:  # a damaged or foreign file must not take the view of a run away
                self._tokenizer = None

    @property
    def found(self) -> bool:
        return self._tokenizer is not None

    def text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(f"⟨{number}⟩" for number in ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def one(self, number: int) -> str:
        """A token by itself, as a candidate is shown."""
        if self._tokenizer is None:
            return f"⟨{number}⟩"
        text = self.text([number])
        if text and _BROKEN not in text:
            return text
        return str(self._tokenizer.id_to_token(number) or f"⟨{number}⟩")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One piece per token. A token that ends within a character has an empty piece; the token that ends
        the character has all of it."""
        if self._tokenizer is None:
            return [f"⟨{number}⟩" for number in ids]
        pieces: list[str] = []
        start = 0
        """First token of the character that is not whole yet."""
        for place in range(len(ids)):
            before = max(0, start - _CONTEXT)
            seen = self.text(ids[before:start])
            now = self.text(ids[before : place + 1])
            fresh = now[len(seen) :] if now.startswith(seen) else self.text(ids[start : place + 1])
            if fresh.endswith(_BROKEN) and place + 1 < len(ids) and place - start < _CONTEXT:
                pieces.append("")
            else:
                pieces.append(fresh)
                start = place + 1
        return pieces
