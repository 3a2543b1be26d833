"""The fixed tokens that every identity check scores, and what an empty model answers to them."""

from __future__ import annotations

import math

import numpy as np

from understudy.types.scores import ScoreItem, Signal

PROBE_TOKENS = 12


def probe_items(vocab: int, max_length: int) -> list[ScoreItem]:
    """One short sequence spread over the vocabulary, the same for every replica."""
    length = max(2, min(PROBE_TOKENS, max_length))
    tokens = ((np.arange(length, dtype=np.int64) + 1) * 7919 % max(vocab, 1)).astype(np.int32)
    return [ScoreItem("probe", tokens, np.arange(1, length, dtype=np.int32), Signal.SAMPLED)]


def is_uniform(logprobs: np.ndarray, vocab: int) -> bool:
    """True when every value is −ln V: a model without weights, or one whose weights were lost."""
    return len(logprobs) > 0 and bool(np.all(np.abs(logprobs + math.log(vocab)) < 1e-3))
