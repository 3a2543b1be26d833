"""The randomness of many requests at once: to the bit what `numpy.random.default_rng(seed).random(count)` gives for each.

Nearly all of that call is spent on turning the seed into a generator, with Python objects made and thrown away: 25 µs a request,
where drawing takes two. Here numpy's own rule for seeds (`SeedSequence`, whose results numpy promises never to change) runs over
all seeds together, and one generator is set to each request's state in turn.

Legend: B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

_WORD = (1 << 32) - 1
_STATE = (1 << 128) - 1
_POOL = 4
"""Words a seed is mixed in."""
_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
"""Of PCG64."""
_LEFT, _RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)


def _constants(first: int, factor: int, count: int) -> list[tuple[np.uint32, np.uint32]]:
    """Of each hash in turn: what a word is crossed with, and what it is multiplied by."""
    words = [first]
    for _ in range(count):
        words.append(words[-1] * factor & _WORD)
    return [(np.uint32(a), np.uint32(b)) for a, b in pairwise(words)]


_MIXING = _constants(0x43B0D7E5, 0x931E8875, _POOL * _POOL)
_GIVING = _constants(0x8B51F9DD, 0x58F38DED, 2 * _POOL)


def _hashed(words_B: np.ndarray, constants: tuple[np.uint32, np.uint32]) -> np.ndarray:
    crossed_B = (words_B ^ constants[0]) * constants[1]
    return crossed_B ^ (crossed_B >> _SHIFT)


def _states(seeds: Sequence[int]) -> np.ndarray:
    """uint64 [B, 4]: `SeedSequence(seed).generate_state(4, numpy.uint64)` of each."""
    seeds_B = np.array(seeds, dtype=np.uint64)
    low_B, high_B = seeds_B.astype(np.uint32), (seeds_B >> np.uint64(32)).astype(np.uint32)
    constants = iter(_MIXING)
    nothing_B = np.zeros_like(low_B)
    pool = [_hashed(words_B, next(constants)) for words_B in (low_B, high_B, nothing_B, nothing_B)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                mixed_B: np.ndarray = _LEFT * pool[target] - _RIGHT * _hashed(pool[source], next(constants))
                pool[target] = mixed_B ^ (mixed_B >> _SHIFT)
    given = [_hashed(pool[i % _POOL], constants) for i, constants in enumerate(_GIVING)]
    return np.stack(given, axis=1).astype("<u4").view("<u8")


def uniforms_of(seeds: Sequence[int], counts: Sequence[int]) -> list[np.ndarray]:
    """float64 [count] of each request; a seed has 64 bits at most."""
    if not seeds:
        return []
    source = np.random.PCG64(0)
    generator, state = np.random.Generator(source), source.state
    drawn = []
    for (start_high, start_low, stream_high, stream_low), count in zip(
        _states(seeds).tolist(), counts, strict=True
    ):
        step = ((stream_high << 64 | stream_low) << 1 | 1) & _STATE
        start = (step + (start_high << 64 | start_low)) & _STATE
        state["state"] = {"state": (start * _MULTIPLIER + step) & _STATE, "inc": step}
        source.state = state
        drawn.append(generator.random(count))
    return drawn
