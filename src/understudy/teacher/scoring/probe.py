"""The fixed tokens that every identity check scores, and the test for an empty model."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from understudy.media.store import hash_of
from understudy.types.scores import ScoreItem, Signal

PROBE_TOKENS = 12
CANARY_KEY = "fixed tokens"
"""The row key of the fixed tokens that a pool sends with every request (`pool/canary.py`)."""
PROBE_PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAKklEQVR42mO8o6HBgA349IhgFWdiIBGMaiAGsITJbc"
    "EqcUIjazSU6KcBADluBLzX17MXAAAAAElFTkSuQmCC"
)
"""A PNG of 16 × 16 pixels in four colours, the same bytes everywhere."""
PROBE_HASH = hash_of(PROBE_PICTURE)


@dataclass(frozen=True, slots=True)
class ProbePicture:
    """The probe's picture as one teacher's tokens."""

    image_token_id: int
    ids: Sequence[int]


def probe_items(
    vocab: int, max_length: int, unused: Sequence[int] = (), shown: ProbePicture | None = None
) -> list[ScoreItem]:
    """One short sequence spread over the vocabulary, the same for every replica; without `unused` ids. With
    `shown` a picture stands after its third token."""
    length = max(2, min(PROBE_TOKENS, max_length))
    tokens = ((np.arange(length, dtype=np.int64) + 1) * 7919 % max(vocab, 1)).astype(np.int32)
    if unused:  # an id without a token is replaced by the next that has one
        known = np.setdiff1d(np.arange(vocab, dtype=np.int32), np.asarray(unused, dtype=np.int32))
        tokens = known[np.searchsorted(known, tokens) % len(known)]
    if shown is None or len(shown.ids) + len(tokens) > max_length:
        return [probe_item("probe", tokens)]
    if shown.image_token_id in tokens:
        other = next(one for one in range(vocab) if one != shown.image_token_id and one not in unused)
        tokens = np.where(tokens == shown.image_token_id, np.int32(other), tokens)
    before = min(3, len(tokens) - 1)
    whole = np.concatenate([tokens[:before], np.asarray(shown.ids, np.int32), tokens[before:]])
    positions = np.concatenate([np.arange(1, before), np.arange(before + len(shown.ids), len(whole))])
    return [ScoreItem("probe", whole, positions.astype(np.int32), Signal.SAMPLED, media=(PROBE_HASH,))]


def probe_family(vocab: int, max_length: int, unused: Sequence[int] = ()) -> list[ScoreItem]:
    """Sequences with a common prefix and one of another length: a test of packing and prefix sharing."""
    whole = probe_items(vocab, max_length, unused)[0]
    other = whole.tokens.copy()
    other[-(len(other) // 3) :] = other[: len(other) // 3]
    short = whole.tokens[: max(2, len(other) // 2)][::-1].copy()
    return [whole, *(probe_item(f"probe-{i}", tokens) for i, tokens in enumerate((other, short)))]


def probe_item(key: str, tokens: np.ndarray) -> ScoreItem:
    """An item that scores every token of a sequence but the first."""
    return ScoreItem(key, tokens, np.arange(1, len(tokens), dtype=np.int32), Signal.SAMPLED)


def is_uniform(logprobs: np.ndarray, vocab: int) -> bool:
    """True if every value is about −ln V: a model whose weights are missing or lost.

    V is not always exact: a server's head may have more rows than the tokenizer has tokens.
    """
    if len(logprobs) == 0:
        return False
    spread = float(logprobs.max() - logprobs.min())
    return spread < 1e-3 and abs(float(logprobs[0]) + math.log(vocab)) < 0.1
