"""A scorer over several ranks: rank 0 leads, the remaining ranks follow request by request.

    leader:    begin(request) ─> broadcast the request's frame ─> the same forward as every rank
    follower:  wait for a frame ─> the same forward, results discarded ─> wait again

    between two parts of a large request
    leader:    frames of the small requests that are served there ─> an empty message ─> the next part
    follower:  the same forward for each frame ─> the empty message ─> the next part

A rank that fails in the middle of a forward would leave its peers waiting for ever. So it exits; the
remaining ranks exit with it, and the launcher restarts the replica.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from understudy.errors import LOST_PEER, TeacherError
from understudy.teacher.head_frame import WireHead
from understudy.teacher.protocol import ScoreRequest, decode_request, encode_request
from understudy.teacher.replica.tensor_parallel import ReplicaRank, shard_head, shard_layers
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.head import Head, head_of, to_wire
from understudy.teacher.scoring.model import FrozenModel, plain_scores
from understudy.teacher.scoring.scorer import QueuedRequest, Scorer, ScorerOptions
from understudy.types.usable_ids import UsableIds

log = logging.getLogger(__name__)

LAYOUTS = list(ScoringLayout)


class LockstepScorer(Scorer):
    """One rank's shard of a scorer. Built from the whole model, which is sharded here.

    On rank 0 `ScoringWorker` calls it; on the remaining ranks `follow` runs it on the main thread.
    """

    def __init__(
        self,
        name: str,
        whole: FrozenModel,
        options: ScorerOptions,
        place: ReplicaRank,
        device: str,
        usable: UsableIds | None = None,
    ) -> None:
        self.place = place
        head = head_of(whole.model)
        own = usable.within(head.vocab) if usable is not None else None
        # The model's own forward of the probe, before sharding: what the shards together must reproduce.
        self._whole_logprobs = plain_scores(whole, own) if place.rank == 0 else np.empty(0, np.float32)
        self._windows_error = (
            self._windows_before_sharding(name, whole, options, own) if place.rank == 0 else None
        )
        self._wire = to_wire(head) if place.rank == 0 else None
        shard_layers(whole.model, place)
        own_head = shard_head(head, place)
        _drop_whole_head(whole)
        whole.model.to(device)
        super().__init__(name, whole.on(device), options, head=_moved(own_head, device), usable=own)

    def _windows_before_sharding(
        self, name: str, whole: FrozenModel, options: ScorerOptions, usable: UsableIds | None
    ) -> Exception | None:
        """The error if packed rows would lose the model's attention windows. It is found before sharding, because the
        check changes the windows in this process only."""
        if options.layout is ScoringLayout.PADDED:
            return None
        alone = Scorer(name, whole, replace(options, layout=ScoringLayout.PACKED), usable=usable)
        try:
            alone.check_windows(self._whole_logprobs)
        except (TeacherError, TypeError, ValueError, RuntimeError) as error:
            return error
        finally:
            with alone.body.own_attention():  # entering it sets the model's attention back
                pass
        return None

    def check_windows(self, theirs: np.ndarray) -> None:
        if self._windows_error is not None:
            raise self._windows_error

    @property
    def wire_head(self) -> WireHead:
        assert self._wire is not None
        return self._wire

    def begin(self, request: ScoreRequest, between: Callable[[], None] | None = None) -> QueuedRequest:
        if self.place.rank == 0:
            # The layout decides how the forward is cut into steps, so it is sent with every request.
            send(LAYOUTS.index(self.body.layout).to_bytes() + encode_request(request))
        try:
            return super().begin(request, lambda: self._between_parts(between))
        except Exception:
            log.exception(
                "process %d of %d failed in the middle of a forward", self.place.rank, self.place.world
            )
            os._exit(LOST_PEER)

    def follow(self) -> None:
        """Score every request the leader broadcasts, until an empty message ends it."""
        if self.options.compile_layers:
            self.body.compile_layers()
        while (request := self._received()) is not None:
            self.finish(self.begin(request))

    def _between_parts(self, between: Callable[[], None] | None) -> None:
        if self.place.rank == 0:
            if between is not None:
                between()
            send(b"")
            return
        while (request := self._received()) is not None:
            self.begin(request)  # its results are discarded: there is nothing to wait for

    def _received(self) -> ScoreRequest | None:
        """The next request; None: an empty message."""
        message = receive()
        if not message:
            return None
        self.body.layout = LAYOUTS[message[0]]
        return decode_request(message[1:])

    def close(self) -> None:
        send(b"")

    def expected(self) -> np.ndarray:
        return self._whole_logprobs


def _drop_whole_head(whole: FrozenModel) -> None:
    """Frees the model's head: `Head` holds the rows from here on. Tied embeddings stay whole."""
    if not getattr(whole.model.config.get_text_config(), "tie_word_embeddings", False):
        whole.model.set_output_embeddings(None)


def _moved(head: Head, device: str) -> Head:
    bias_V = None if head.bias_V is None else head.bias_V.to(device)
    return Head(
        head.weight_VH.to(device),
        bias_V,
        head.scale,
        head.softcap,
        head.reader,
        head.vocab_size,
        head.widest_shard,
    )


def send(message: bytes) -> None:
    """Broadcast to all ranks through host memory, so that waiting ranks keep no device busy."""
    dist.broadcast(torch.tensor([len(message)], dtype=torch.int64), 0)
    if message:
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0)


def receive() -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, 0)
    message = torch.empty(int(size), dtype=torch.uint8)
    if len(message):
        dist.broadcast(message, 0)
    return message.numpy().tobytes()
