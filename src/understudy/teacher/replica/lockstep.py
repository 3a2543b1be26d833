"""A scorer spread over several processes: process 0 leads, the others follow it request by request.

    leader:    begin(request) ─> broadcast the request's frame ─> the same forward as everyone
    follower:  wait for a frame ─> the same forward, results thrown away ─> wait again

A process that fails in the middle of a forward leaves the others waiting, so it ends; the rest end with it, and
whoever launched the replica starts it again.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import torch
import torch.distributed as dist

from understudy.teacher.protocol import ScoreRequest, WireHead, decode_request, encode_request
from understudy.teacher.replica.tensor_parallel import Place, shard_head, shard_layers
from understudy.teacher.scoring.body import Layout
from understudy.teacher.scoring.head import Head, head_of, to_wire
from understudy.teacher.scoring.model import FrozenModel
from understudy.teacher.scoring.scorer import Begun, Scorer, ScorerOptions, plain_truth
from understudy.types.usable_ids import UsableIds

log = logging.getLogger(__name__)

LAYOUTS = list(Layout)


class LockstepScorer(Scorer):
    """The part of a scorer that one process holds. Built from the whole model, which is cut here."""

    def __init__(
        self,
        name: str,
        whole: FrozenModel,
        options: ScorerOptions,
        place: Place,
        device: str,
        usable: UsableIds | None = None,
    ) -> None:
        self.place = place
        head = head_of(whole.model)
        own = usable.within(head.vocab) if usable is not None else None
        # The model's own forward of the probe, before it is cut: what the parts together must give.
        self._truth = plain_truth(whole, own) if place.rank == 0 else np.empty(0, np.float32)
        self._wire = to_wire(head) if place.rank == 0 else None
        shard_layers(whole.model, place)
        own_head = shard_head(head, place)
        _drop_whole_head(whole)
        whole.model.to(device)
        super().__init__(name, whole.on(device), options, head=_moved(own_head, device), usable=own)

    @property
    def wire_head(self) -> WireHead:
        assert self._wire is not None
        return self._wire

    def begin(self, request: ScoreRequest) -> Begun:
        if self.place.rank == 0:
            # The layout decides how the forward is cut into steps, so it travels with every request.
            send(LAYOUTS.index(self.body.layout).to_bytes() + encode_request(request))
        try:
            return super().begin(request)
        except Exception:
            log.exception(
                "process %d of %d failed in the middle of a forward", self.place.rank, self.place.world
            )
            os._exit(4)

    def follow(self) -> None:
        """Score what the leader scores, until it says that there is nothing more."""
        if self.options.compile_layers:
            self.body.compile_layers()
        while message := receive():
            self.body.layout = LAYOUTS[message[0]]
            self.finish(self.begin(decode_request(message[1:])))

    def close(self) -> None:
        send(b"")

    def _expected(self) -> np.ndarray:
        return self._truth


def _drop_whole_head(whole: FrozenModel) -> None:
    """The head's rows live in `Head` from here on; tied embeddings stay whole."""
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
    """To everyone; through the host, so that processes that wait keep no device busy."""
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
