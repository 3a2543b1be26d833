"""Prefill-only scoring with any transformers causal LM.

    request ─> groups by (signal, K) ─> micro-batches ─> body ─> states before scored tokens ─> head ─> reply

There is no KV cache, no decoding and no sampling. `begin` queues the work of a request on the device and
`finish` collects it, so a GPU computes one request while the next is prepared and the previous one is sent.
Of a large request a GPU has at most two micro-batches queued: one that runs and one that is ready. So what is queued
between two micro-batches (`between`) runs soon, and the device never waits for the host.

Legend: N sequences, T tokens, P scored positions, B sequences of a micro-batch, H hidden size, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from understudy.errors import TeacherError
from understudy.nn.short_windows import short_windows
from understudy.teacher.head_frame import WireHead
from understudy.teacher.protocol import ScoreReply, ScoreRequest, exclusive_cumsum, request_of
from understudy.teacher.scoring.body import Body, ScoringLayout
from understudy.teacher.scoring.device_work import Event, event_on, to_host
from understudy.teacher.scoring.head import Head, head_of, score_rows, to_wire
from understudy.teacher.scoring.model import DTYPES, FrozenModel, plain_scores
from understudy.teacher.scoring.packing import as_slice, ragged_ranges
from understudy.teacher.scoring.probe import probe_family
from understudy.teacher.scoring.signal_groups import (
    GroupScores,
    SignalGroup,
    groups_of,
    in_request_order,
    named_ids,
    needed_lengths,
)
from understudy.types.scores import ScoreItem, Signal
from understudy.types.usable_ids import UsableIds

TORN = -2
"""The version of a model that was interrupted while it took new weights."""


@dataclass(frozen=True, slots=True)
class ScorerOptions:
    """Batch sizes, layout and compilation of a `Scorer`."""

    max_batch_tokens: int = 16384
    """The most tokens of one forward, including padding."""
    chunk_bytes: int = 64 << 20
    """The largest fp32 logits chunk the head may hold."""
    layout: ScoringLayout = ScoringLayout.AUTO
    share_prefixes: bool = True
    compile_layers: bool = False
    """torch.compile for each decoder layer: faster on GPUs, costs some seconds at start."""
    pictures_together: bool = False
    """New pictures share forwards of the vision tower; scores then depend on earlier requests in their last bits."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The scores of one micro-batch, being copied to the host, and their places in the group."""

    places: np.ndarray
    sampled: torch.Tensor
    ids: torch.Tensor | None
    logprobs: torch.Tensor | None
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request whose work is queued on the device."""

    request: ScoreRequest
    groups: list[SignalGroup]
    parts: list[list[_Part]]
    done: Event


class Scorer:
    """Scores requests with one frozen model. Called by `ScoringWorker`.

    On a CPU several threads may call it once it is warmed up; on a GPU one thread.
    """

    def __init__(
        self,
        name: str,
        frozen: FrozenModel,
        options: ScorerOptions | None = None,
        *,
        head: Head | None = None,
        usable: UsableIds | None = None,
    ) -> None:
        """`usable`: the ids that have a token; None: all."""
        self.name = name
        self.frozen = frozen
        self.options = options or ScorerOptions()
        self.head: Head = head or head_of(frozen.model)
        if frozen.pictures is not None:  # no token is ever a placeholder, for any model of a run
            places = frozen.pictures.processor.placeholder_ids
            usable = (usable or UsableIds(self.head.vocab)).without(places)
        self.usable = usable.within(self.head.vocab) if usable is not None else None
        self.version = -1
        """The version of the weights; −1: those that were loaded."""
        self.body = Body(
            frozen,
            self.options.layout,
            self.options.share_prefixes,
            self.options.max_batch_tokens,
            self.options.pictures_together,
        )

    @property
    def vocab(self) -> int:
        """Ids are below this."""
        return self.head.vocab if self.usable is None else self.usable.limit

    @property
    def hidden_size(self) -> int:
        return self.head.weight_VH.shape[1]

    def score(self, request: ScoreRequest) -> ScoreReply:
        """Score every sequence of the request; the result depends on the request alone."""
        return self.finish(self.begin(request))

    def is_large(self, request: ScoreRequest) -> bool:
        """Whether it is scored in several parts."""
        return len(request.tokens_T) > self.options.max_batch_tokens

    @torch.inference_mode()
    def begin(self, request: ScoreRequest, between: Callable[[], None] | None = None) -> QueuedRequest:
        """`between` is called between two parts of a large request, and may begin and finish small ones."""
        groups = groups_of(request)
        events = [self._event()]
        pause = between if self.is_large(request) else None
        parts = [self._queue_group(request, group, events, pause) for group in groups]
        return QueuedRequest(request, groups, parts, events[-1])

    def finish(self, begun: QueuedRequest) -> ScoreReply:
        begun.done.synchronize()
        request = begun.request
        columns = [
            self._collect(request, group, parts)
            for group, parts in zip(begun.groups, begun.parts, strict=True)
        ]
        ids, logprobs, hidden, sampled_P = in_request_order(request, begun.groups, columns)
        return ScoreReply(
            teacher=self.name,
            keys=request.keys,
            signals=request.signals,
            k_N=request.k_N,
            position_counts_N=request.position_counts_N,
            digests_N=request.digests_N,
            scored_P=request.tokens_T[request.flat_positions_P],
            sampled_P=sampled_P,
            ids=ids,
            logprobs=logprobs,
            hidden=hidden,
            hidden_size=self.hidden_size,
            version=self.version,
        )

    @torch.no_grad()
    def take_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces every weight in place. No request may be under way.

        Raises if the set does not fit the model or cannot be read. The model may then hold weights of two
        versions: its replies say `TORN` from then on, which no pool accepts."""
        self.version = TORN
        own = dict(self.frozen.model.named_parameters())
        missing = set(own)
        for name, tensor in tensors:
            if name not in own or own[name].shape != tensor.shape:
                found = list(own[name].shape) if name in own else "no such weight"
                raise TeacherError(f"{name} came as {list(tensor.shape)}; this teacher has {found}")
            own[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise TeacherError(f"{len(missing)} weights did not come, first {min(missing)}")
        self.body.weights_changed()
        self.version = version

    def _event(self) -> Event:
        """After all work that was queued so far."""
        return event_on(self.frozen.device)

    def _queue_group(
        self,
        request: ScoreRequest,
        group: SignalGroup,
        events: list[Event],
        between: Callable[[], None] | None,
    ) -> list[_Part]:
        """`events`: before the first part of the request, and after each that was queued."""
        counts_N = request.position_counts_N.astype(np.int64)
        starts_N = exclusive_cumsum(counts_N)
        place_N = np.zeros(len(request), dtype=np.int64)
        place_N[group.rows] = exclusive_cumsum(counts_N[group.rows])
        flat_P = request.flat_positions_P
        lengths_N = needed_lengths(request, self.body.rotary_border)
        named = named_ids(request, group)
        scored_rows = [row for row in group.rows if counts_N[row]]
        parts = []
        for batch in self.body.plan(request, scored_rows, lengths_N):
            if between is not None and len(events) > 1:
                events[-2].synchronize()  # the last part may still run
                between()
            rows = batch.rows
            wanted = ragged_ranges(starts_N[rows], counts_N[rows])
            places = ragged_ranges(place_N[rows], counts_N[rows])
            # The state that predicts a token is one position to its left.
            states_PH = self.body.states(
                request, batch, lengths_N, request.positions_P[wanted] - 1, counts_N[rows]
            )
            scored_P = self.body.to_device(request.tokens_T[flat_P[wanted]].astype(np.int64))
            named_PK = None if named is None else self.body.to_device(named[places].astype(np.int64))
            usable = request.usable or self.usable
            parts.append(self._queue_head(group, places, states_PH, scored_P, named_PK, usable))
            events.append(self._event())
        return parts

    def _queue_head(
        self,
        group: SignalGroup,
        places: np.ndarray,
        states_PH: torch.Tensor,
        scored_P: torch.Tensor,
        named_PK: torch.Tensor | None,
        usable: UsableIds | None,
    ) -> _Part:
        scores = score_rows(
            self.head,
            states_PH,
            scored_P,
            topk=group.k if group.signal is Signal.TOPK else 0,
            at_ids_PK=named_PK,
            chunk_bytes=self.options.chunk_bytes,
            usable=usable,
        )
        hidden = states_PH.to(torch.bfloat16).view(torch.uint16) if group.signal is Signal.HIDDEN else None
        return _Part(
            places,
            to_host(scores.sampled_P),
            None if scores.ids_PK is None else to_host(scores.ids_PK),
            None if scores.logprobs_PK is None else to_host(scores.logprobs_PK),
            None if hidden is None else to_host(hidden),
        )

    def _collect(self, request: ScoreRequest, group: SignalGroup, parts: Sequence[_Part]) -> GroupScores:
        """The scores of all micro-batches of a group, in request order."""
        total = int(request.position_counts_N[group.rows].sum(dtype=np.int64))
        sampled = np.empty(total, np.float32)
        ids = (
            np.empty((total, group.k), np.int32) if group.signal is Signal.TOPK else named_ids(request, group)
        )
        logprobs = np.empty((total, group.k), np.float32) if group.k else None
        hidden = np.empty((total, self.hidden_size), np.uint16) if group.signal is Signal.HIDDEN else None
        for part in parts:
            places = as_slice(part.places)
            sampled[places] = part.sampled.numpy()
            for column, tensor in ((ids, part.ids), (logprobs, part.logprobs), (hidden, part.hidden)):
                if column is not None and tensor is not None:
                    column[places] = tensor.numpy()
        return GroupScores(sampled, ids, logprobs, hidden)

    def probe(self) -> list[ScoreItem]:
        """The sequences that `warm_up.py` scores."""
        return probe_family(self.vocab, self.frozen.max_length, self.usable.holes if self.usable else ())

    @torch.inference_mode()
    def check_windows(self, theirs: np.ndarray) -> None:
        """Raises if the model has attention windows that do not reach packed attention. `theirs`: the probe's
        logprobs by the model's own forward."""
        with short_windows(self.frozen.model) as windowed:
            if not windowed:
                return
            with self.body.own_attention():
                short = plain_scores(self.frozen, self.usable)
            ours = self.score(request_of(self.probe())).sampled_P
        # Rounding moves packed scores a little; without the window they equal those of long windows.
        if np.linalg.norm(ours - short) > np.linalg.norm(ours - theirs):
            raise TeacherError("its attention windows are in the mask alone, which packed rows have none of")

    def expected(self) -> np.ndarray:
        """The probe's logprobs by the model's own forward."""
        return plain_scores(self.frozen, self.usable)

    @property
    def wire_head(self) -> WireHead:
        return to_wire(self.head, DTYPES[self.frozen.dtype])

    def close(self) -> None:
        """Nothing to release here; a scorer over several ranks ends its followers."""
