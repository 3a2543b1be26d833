"""Randomness by name: a seed is a hash of what it is for, so nothing depends on who asked first.

A rollout that is made again after a crash, on another worker, or in another order draws the same tokens.
"""

from __future__ import annotations

from hashlib import blake2b


def hash63(*parts: str | int) -> int:
    """A 63-bit number from the parts. Parts are length-prefixed: ("ab", "c") and ("a", "bc") differ."""
    digest = blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little") >> 1


def derive_seed(run_seed: int, epoch: int, prompt_key: str, session: int, turn: int) -> int:
    """The seed of one generation: turn `turn` of session `session` of a prompt instance."""
    return hash63("generate", run_seed, epoch, prompt_key, session, turn)
