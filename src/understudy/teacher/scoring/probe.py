"""The fixed tokens that every identity check scores, and what an empty model answers to them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from understudy.types.scores import ScoreItem, Signal

PROBE_TOKENS = 12


def probe_items(vocab: int, max_length: int, unused: Sequence[int] = ()) -> list[ScoreItem]:
    """One short sequence spread over the vocabulary, the same for every replica; ids that are `unused` are left out."""
    length = max(2, min(PROBE_TOKENS, max_length))
    tokens = ((np.arange(length, dtype=np.int64) + 1) * 7919 % max(vocab, 1)).astype(np.int32)
    if unused:  # an id without a token gives way to the next that has one
        known = np.setdiff1d(np.arange(vocab, dtype=np.int32), np.asarray(unused, dtype=np.int32))
        tokens = known[np.searchsorted(known, tokens) % len(known)]
    return [judged("probe", tokens)]


def probe_family(vocab: int, max_length: int, unused: Sequence[int] = ()) -> list[ScoreItem]:
    """Sequences that share a beginning, and one of another length: what packing and prefix sharing must get right."""
    whole = probe_items(vocab, max_length, unused)[0]
    other = whole.tokens.copy()
    other[-(len(other) // 3) :] = other[: len(other) // 3]
    short = whole.tokens[: max(2, len(other) // 2)][::-1].copy()
    return [whole, *(judged(f"probe-{i}", tokens) for i, tokens in enumerate((other, short)))]


def judged(key: str, tokens: np.ndarray) -> ScoreItem:
    """A sequence of which every token but the first is to be judged."""
    return ScoreItem(key, tokens, np.arange(1, len(tokens), dtype=np.int32), Signal.SAMPLED)


def is_uniform(logprobs: np.ndarray, vocab: int) -> bool:
    """True when every value is the same, about −ln V: a model without weights, or one whose weights were lost.

    V is not exact everywhere: a server may have more rows in its head than the tokenizer has tokens.
    """
    if len(logprobs) == 0:
        return False
    spread = float(logprobs.max() - logprobs.min())
    return spread < 1e-3 and abs(float(logprobs[0]) + math.log(vocab)) < 0.1
