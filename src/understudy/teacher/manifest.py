"""What a replica says about itself. Two replicas of one teacher must say the same; a resumed run checks it again."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from understudy.teacher import protocol
from understudy.types.scores import Signal
from understudy.types.usable_ids import UsableIds


class Batching(StrEnum):
    BY_REQUEST = "by_request"
    """A request is scored alone: its scores depend on nothing else (determinism = "full")."""
    BY_ARRIVAL = "by_arrival"
    """Waiting requests are merged into full micro-batches (determinism = "fast")."""


class Limits(msgspec.Struct, frozen=True):
    """What a replica refuses beyond, with a 4xx that says so."""

    max_length: int = 1 << 30
    """Tokens of one sequence."""
    max_request_tokens: int = 1 << 20
    max_request_bytes: int = 64 << 20
    max_reply_bytes: int = 1 << 30
    max_k: int = 1024


class Manifest(msgspec.Struct, frozen=True):
    teacher: str
    backend: str
    """"native", "vllm" or "openai"."""
    model: str
    weights_sha256: str
    """Empty where a backend does not let us see its weights."""
    vocab_fingerprint: str
    vocab_size: int
    """Ids are below this: one more than the last that has a token. A head may have more rows."""
    hidden_size: int
    dtype: str
    signals: list[Signal]
    limits: Limits
    batching: Batching = Batching.BY_REQUEST
    protocol: int = protocol.VERSION
    unused_ids: list[int] = []
    """Ids below `vocab_size` without a token; mostly there are none."""
    leaves_out_ids: bool = False
    """Whether a request may name the ids it wants (`id_limit`); older servers do not know the field."""

    def cut_to(self, usable: UsableIds | None) -> Manifest:
        """As a run sees it that uses these ids only."""
        cut = None if usable is None else usable.within(self.vocab_size)
        if cut is None:
            return self
        return msgspec.structs.replace(self, vocab_size=cut.limit, unused_ids=list(cut.holes))

    @property
    def identity(self) -> tuple[str, str, str, int, str]:
        """What must be equal for two replicas to be the same teacher, wherever they keep its files."""
        return (self.backend, self.weights_sha256, self.vocab_fingerprint, self.vocab_size, self.dtype)
