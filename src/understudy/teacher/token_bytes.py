"""The bytes that each token of a tokenizer writes, read from its tokenizer.json, and its tokens of a text.

| tokenizer | token | bytes |
|---|---|---|
| byte-level BPE | `Ġcafé` | ` caf` and the two bytes of `é` |
| SentencePiece | `▁caf`, `<0xC3>` (byte fallback) | ` caf`, `\\xc3` |
| pieces of text | `caf` | `caf` |

Special tokens write no text, so they have no bytes. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from understudy.errors import TeacherError

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBE = "a 1 b\nc"


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: the character that stands for each byte in the tokens of a byte-level BPE."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


class TokenBytes:
    """One tokenizer, as bytes. Immutable; used on the event loop and by `check`."""

    def __init__(self, definition: str, place: str) -> None:
        """`definition`: the text of tokenizer.json. `place`: the model's key in the recipe, for errors. Raises
        `TeacherError` if its tokens are not pieces of the text."""
        self._place = place
        table: dict[str, Any] = json.loads(definition)
        self.special: dict[int, str] = {}
        """Tokens that write no text, such as the end of a turn: id → name."""
        self.pieces: dict[int, bytes] = {}
        """id → what the token writes."""
        write = _writer(table)
        model = table.get("model") or {}
        vocab = model.get("vocab") or {}
        tokens = vocab.items() if isinstance(vocab, dict) else ((one[0], i) for i, one in enumerate(vocab))
        for token, number in tokens:
            self.pieces[number] = write(token)
        for added in table.get("added_tokens") or ():
            self.pieces.pop(added["id"], None)
            if added.get("special"):
                self.special[added["id"]] = added["content"]
            else:
                self.pieces[added["id"]] = added["content"].encode("utf-8", "surrogatepass")
        self._tokenizer = Tokenizer.from_str(json.dumps(_of_plain_text(table)))
        self._tokenizer.encode_special_tokens = True  # the text "<eos>" is not the token
        self._check()

    @classmethod
    def load(cls, folder: Path, place: str) -> TokenBytes:
        path = folder / "tokenizer.json"
        try:
            return cls(path.read_text("utf-8"), place)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TeacherError(
                f"{place}: vocabulary = 'align' reads tokens as bytes from {path}, and it cannot be read: {error}; save the tokenizer "
                "with its tokenizer.json"
            ) from None

    def encode(self, text: str) -> list[int]:
        """Its tokens of a text that stands within a sequence: no prefix, no special tokens, no normalisation."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def bytes_of(self, ids: Sequence[int]) -> list[bytes]:
        """What each token writes; nothing for a special one."""
        return [self.pieces.get(number, b"") for number in ids]

    def by_bytes(self) -> dict[bytes, int]:
        """bytes → id. If several tokens write the same bytes, the one that the tokenizer itself would take, or
        the smallest id."""
        found: dict[bytes, int] = {}
        for number, piece in sorted(self.pieces.items()):
            if not piece:
                continue
            if piece not in found or (self._is_own(piece, number) and not self._is_own(piece, found[piece])):
                found[piece] = number
        return found

    def _is_own(self, piece: bytes, number: int) -> bool:
        try:
            return self.encode(piece.decode()) == [number]
        except UnicodeDecodeError:
            return False

    def _check(self) -> None:
        ids = self.encode(_PROBE)
        text = b"".join(self.bytes_of(ids))
        unknown = any(number in self.special for number in ids)
        if text != _PROBE.encode() and not unknown:
            raise TeacherError(
                f"{self._place}: vocabulary = 'align' needs tokens that are pieces of the text, and this tokenizer writes {text!r} for "
                f"{_PROBE!r}; choose a model with a byte-level BPE or a SentencePiece tokenizer"
            )


def _writer(table: Mapping[str, Any]) -> Any:
    """A function from a token's name to the bytes that it writes."""
    kinds = {part.get("type") for key in ("decoder", "pre_tokenizer") for part in _parts(table.get(key))}
    spaces = "Metaspace" in kinds or any(
        part.get("type") == "Replace" and part.get("content") == _SPACE
        for part in _parts(table.get("normalizer"))
    )
    fallback = bool((table.get("model") or {}).get("byte_fallback"))

    def write(token: str) -> bytes:
        if "ByteLevel" in kinds and all(one in _BYTE_OF for one in token):
            return bytes(_BYTE_OF[one] for one in token)
        if fallback and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token.replace(_SPACE, " ") if spaces else token).encode("utf-8", "surrogatepass")

    return write


def _parts(step: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, with those of sequences in them."""
    if not isinstance(step, Mapping):
        return
    yield step
    for name in ("normalizers", "pretokenizers", "decoders"):
        for part in step.get(name) or ():
            yield from _parts(part)


def _of_plain_text(table: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer without what changes a text: prefixes, normal forms, special tokens around it. Spaces keep
    their mark."""
    marks = [
        part
        for part in _parts(table.get("normalizer"))
        if part.get("type") == "Replace" and part.get("content") == _SPACE
    ]
    normalizer = {"type": "Sequence", "normalizers": marks} if marks else None
    changed = {"normalizer": normalizer, "post_processor": None, "truncation": None, "padding": None}
    return {**table, **changed, "pre_tokenizer": _without_prefix(table.get("pre_tokenizer"))}


def _without_prefix(step: Any) -> Any:
    if not isinstance(step, Mapping):
        return step
    own = dict(step)
    if own.get("type") == "Metaspace":
        own["prepend_scheme"] = "never"
        own.pop("add_prefix_space", None)
    elif "add_prefix_space" in own:
        own["add_prefix_space"] = False
    if "pretokenizers" in own:
        own["pretokenizers"] = [_without_prefix(part) for part in own["pretokenizers"]]
    return own
