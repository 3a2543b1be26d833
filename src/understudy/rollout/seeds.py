"""Derives seeds by hashing what they are for, so they do not depend on the order of calls.

A rollout that is repeated after a crash, on another worker, or in another order draws the same tokens.
"""

from __future__ import annotations

from hashlib import blake2b


def hash63(*parts: str | int) -> int:
    """A 63-bit hash of the parts. Parts are length-prefixed: ("ab", "c") and ("a", "bc") differ."""
    digest = blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little") >> 1


def derive_seed(run_seed: int, epoch: int, prompt_key: str, session: int, turn: int) -> int:
    """The seed of one generation: turn `turn` of session `session` of a prompt instance."""
    return hash63("generate", run_seed, epoch, prompt_key, session, turn)
