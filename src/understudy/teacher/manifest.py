"""The manifest: how a replica describes itself.

All replicas of one teacher must have the same identity. A resumed run checks it again.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import msgspec

from understudy.media.processor import PictureReader
from understudy.teacher import protocol
from understudy.teacher.scoring.probe import PROBE_HASH
from understudy.types.scores import Signal
from understudy.types.usable_ids import UsableIds


class RequestBatching(StrEnum):
    BY_REQUEST = "by_request"
    """A request is scored alone: its scores depend on nothing else (determinism = "full")."""
    BY_ARRIVAL = "by_arrival"
    """Waiting requests are merged into full micro-batches (determinism = "fast")."""


class Limits(msgspec.Struct, frozen=True):
    """The largest requests a replica serves; beyond them it answers with a 4xx and the reason."""

    max_length: int = 1 << 30
    """Tokens of one sequence."""
    max_request_tokens: int = 1 << 20
    max_request_bytes: int = 64 << 20
    max_reply_bytes: int = 1 << 30
    max_k: int = 1024


class PictureFacts(msgspec.Struct, frozen=True):
    """How a teacher reads pictures."""

    image_token_id: int
    patching: dict[str, Any]
    """What decides how many tokens a picture has: compared with the student's."""
    settings: dict[str, Any]
    """Everything that decides the numbers a picture becomes."""
    probe_tokens: int
    """Placeholders of the picture that goes with the fixed tokens."""
    probe_ids: list[int] = []
    """All ids that stand for it, tags of its tiles included; empty: the placeholders alone."""


def picture_facts(reader: PictureReader) -> PictureFacts:
    """Of a model with this processor; its store has the picture of the fixed tokens."""
    processor = reader.processor
    return PictureFacts(
        processor.image_token_id,
        processor.patching,
        processor.settings,
        reader.count(PROBE_HASH),
        processor.ids_of(reader.size(PROBE_HASH)),
    )


class QuantizationError(msgspec.Struct, frozen=True):
    """The quantized model against itself before, on the fixed tokens; in nats."""

    mean: float
    """Of |log p − log p'| of the tokens."""
    worst: float
    kl: float
    """Mean KL(p ‖ p') over the vocabulary."""

    def __str__(self) -> str:
        return f"KL {self.kl:.2g} nats, log-probabilities {self.mean:.2g} apart (worst {self.worst:.2g})"


class Manifest(msgspec.Struct, frozen=True):
    """Served at /manifest; read by clients and by the pool."""

    teacher: str
    backend: str
    """"native", "vllm" or "openai"."""
    model: str
    weights_sha256: str
    """Empty if the backend does not show its weights."""
    vocab_fingerprint: str
    vocab_size: int
    """Ids are below this: one more than the last id with a token. A head may have more rows."""
    hidden_size: int
    dtype: str
    signals: list[Signal]
    limits: Limits
    batching: RequestBatching = RequestBatching.BY_REQUEST
    protocol: int = protocol.VERSION
    unused_ids: list[int] = []
    """Ids below `vocab_size` without a token; usually none."""
    leaves_out_ids: bool = False
    """Whether a request may name the ids it wants (`id_limit`); older servers do not know the field."""
    version: int = -1
    """Of a teacher that follows the student: the version of its weights. −1: those it was loaded with."""
    pictures: PictureFacts | None = None
    """How it reads pictures; None: it reads text only."""
    quantization: QuantizationError | None = None
    """What eight-bit weights change (`dtype` ends in +int8 or +fp8); None: the weights are as loaded."""

    def cut_to(self, usable: UsableIds | None) -> Manifest:
        """This manifest for a run that uses only these ids."""
        cut = None if usable is None else usable.within(self.vocab_size)
        if cut is None:
            return self
        return msgspec.structs.replace(self, vocab_size=cut.limit, unused_ids=list(cut.holes))

    @property
    def identity(self) -> tuple[str, str, str, int, str, int, str]:
        """What must be equal for two replicas to be the same teacher. The path of the model may differ."""
        pictures = "" if self.pictures is None else json.dumps(self.pictures.settings, sort_keys=True)
        return (
            self.backend,
            self.weights_sha256,
            self.vocab_fingerprint,
            self.vocab_size,
            self.dtype,
            self.version,
            pictures,
        )
