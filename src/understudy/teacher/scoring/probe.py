"""The fixed tokens that every identity check scores, and the test for an empty model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from understudy.types.scores import ScoreItem, Signal

PROBE_TOKENS = 12


def probe_items(vocab: int, max_length: int, unused: Sequence[int] = ()) -> list[ScoreItem]:
    """One short sequence spread over the vocabulary, the same for every replica; without `unused` ids."""
    length = max(2, min(PROBE_TOKENS, max_length))
    tokens = ((np.arange(length, dtype=np.int64) + 1) * 7919 % max(vocab, 1)).astype(np.int32)
    if unused:  # an id without a token is replaced by the next that has one
        known = np.setdiff1d(np.arange(vocab, dtype=np.int32), np.asarray(unused, dtype=np.int32))
        tokens = known[np.searchsorted(known, tokens) % len(known)]
    return [probe_item("probe", tokens)]


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
