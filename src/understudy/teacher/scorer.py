"""Prefill-only scoring with any transformers causal LM.

    request ─> groups of one (signal, K) ─> micro-batches ─> body ─> hidden states of the judged positions ─> head ─> reply

There is no KV cache, no decoding and no sampling here. On CPU a micro-batch is right-padded: causal attention never
looks right, so padding needs no mask and changes nothing to its left.

Legend: N sequences, T tokens, P judged positions, B sequences of a micro-batch, L its longest, H hidden, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from understudy.errors import TeacherError
from understudy.teacher.head import Head, HeadScores, head_of, score_rows
from understudy.teacher.model import FrozenModel
from understudy.teacher.packing import pad_right, padded_plan, ragged_ranges
from understudy.teacher.probe import is_uniform, probe_items
from understudy.teacher.protocol import ScoreReply, ScoreRequest, exclusive_cumsum, request_of
from understudy.types.scores import Signal


@dataclass(frozen=True, slots=True)
class ScorerOptions:
    max_batch_tokens: int = 16384
    """Tokens of one forward, padding counted in."""
    chunk_bytes: int = 64 << 20
    """The largest fp32 logits chunk the head may hold."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The sequences of a request that ask for the same signal with the same K."""

    signal: Signal
    k: int
    rows: list[int]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The scores of one group, its positions in request order."""

    sampled: np.ndarray
    ids: np.ndarray | None
    logprobs: np.ndarray | None
    hidden: np.ndarray | None


class Scorer:
    """Scores requests with one frozen model. Not thread-safe: one thread owns it."""

    def __init__(self, name: str, frozen: FrozenModel, options: ScorerOptions | None = None) -> None:
        self.name = name
        self.frozen = frozen
        self.options = options or ScorerOptions()
        self.head: Head = head_of(frozen.model)

    @property
    def vocab(self) -> int:
        return self.head.vocab

    @property
    def hidden_size(self) -> int:
        return self.head.weight_VH.shape[1]

    @torch.inference_mode()
    def score(self, request: ScoreRequest) -> ScoreReply:
        """Judge every sequence of the request; the result depends on the request alone."""
        groups = _groups_of(request)
        columns = [self._score_group(request, group) for group in groups]
        ids, logprobs, hidden, sampled_P = _in_request_order(request, groups, columns)
        return ScoreReply(
            teacher=self.name,
            keys=request.keys,
            signals=request.signals,
            k_N=request.k_N,
            position_counts_N=request.position_counts_N,
            digests_N=request.digests_N,
            judged_P=request.tokens_T[request.flat_positions_P],
            sampled_P=sampled_P,
            ids=ids,
            logprobs=logprobs,
            hidden=hidden,
            hidden_size=self.hidden_size,
        )

    def _score_group(self, request: ScoreRequest, group: _Group) -> _Columns:
        """Micro-batch by micro-batch; each writes its rows where request order wants them."""
        rows = np.array(group.rows)
        counts = request.position_counts_N[rows].astype(np.int64)
        total, at = int(counts.sum()), exclusive_cumsum(counts)
        position_starts = exclusive_cumsum(request.position_counts_N)[rows]
        named = _named_ids(request, group)
        sampled = np.empty(total, np.float32)
        ids = np.empty((total, group.k), np.int32) if group.k else None
        logprobs = np.empty((total, group.k), np.float32) if group.k else None
        hidden = np.empty((total, self.hidden_size), np.uint16) if group.signal is Signal.HIDDEN else None
        lengths = _needed_lengths(request)
        for members in padded_plan(lengths[rows].tolist(), self.options.max_batch_tokens):
            places = ragged_ranges(at[members], counts[members])
            if not len(places):
                continue
            wanted = ragged_ranges(position_starts[members], counts[members])
            batch = rows[members].tolist()
            hidden_PH = self._hidden_states(
                request, lengths, batch, request.positions_P[wanted], counts[members]
            )
            judged_P = torch.from_numpy(request.tokens_T[request.flat_positions_P[wanted]].astype(np.int64))
            named_PK = None if named is None else torch.from_numpy(named[places].astype(np.int64))
            scores = self._head_scores(group, hidden_PH, judged_P, named_PK)
            sampled[places] = scores.sampled_P.cpu().numpy()
            if ids is not None and logprobs is not None:
                assert scores.ids_PK is not None and scores.logprobs_PK is not None
                ids[places] = scores.ids_PK.cpu().numpy()
                logprobs[places] = scores.logprobs_PK.cpu().numpy()
            if hidden is not None:
                hidden[places] = hidden_PH.to(torch.bfloat16).view(torch.uint16).cpu().numpy()
        return _Columns(sampled, ids, logprobs, hidden)

    def _head_scores(
        self, group: _Group, hidden_PH: torch.Tensor, judged_P: torch.Tensor, named_PK: torch.Tensor | None
    ) -> HeadScores:
        device = self.frozen.device
        return score_rows(
            self.head,
            hidden_PH,
            judged_P.to(device),
            topk=group.k if group.signal is Signal.TOPK else 0,
            at_ids_PK=None if named_PK is None else named_PK.to(device),
            chunk_bytes=self.options.chunk_bytes,
        )

    def _hidden_states(
        self,
        request: ScoreRequest,
        lengths_N: np.ndarray,
        batch: Sequence[int],
        positions_P: np.ndarray,
        counts_B: np.ndarray,
    ) -> torch.Tensor:
        """[P, H]: the states that predict each judged token, i.e. those one position to its left."""
        padded_BL = pad_right(request.tokens_T, request.starts_N, lengths_N, batch)
        tokens = torch.from_numpy(padded_BL).to(self.frozen.device)
        hidden_BLH = self.frozen.body(input_ids=tokens, use_cache=False).last_hidden_state
        places_P = np.repeat(np.arange(len(batch)), counts_B) * padded_BL.shape[1] + positions_P - 1
        return hidden_BLH.flatten(0, 1)[torch.from_numpy(places_P).to(self.frozen.device)]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Really score once, and prove the result: it equals the model's own forward and is no uniform noise."""
        request = request_of(probe_items(self.vocab, self.frozen.max_length))
        ours = self.score(request).sampled_P
        tokens = torch.from_numpy(request.tokens_T.astype(np.int64)).to(self.frozen.device)
        logits = self.frozen.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        theirs = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1).cpu().numpy()
        tolerance = 1e-3 if self.frozen.dtype == "float32" else 0.25
        if not np.allclose(ours, theirs, atol=tolerance, rtol=0):
            raise TeacherError(
                f"teacher {self.name}: scores of {self.frozen.path} differ from the model's own forward by "
                f"{np.abs(ours - theirs).max():.3g} nats; this architecture treats its logits in a way not known here"
            )
        if is_uniform(ours, self.vocab):
            raise TeacherError(
                f"teacher {self.name}: {self.frozen.path} gives every token the same probability (−ln V = "
                f"{-math.log(self.vocab):.4f}); its weights look empty or uninitialised"
            )


def _needed_lengths(request: ScoreRequest) -> np.ndarray:
    """int64 [N]: how many tokens of each sequence the model must read. Nothing after the state that predicts the
    last judged token matters, so that token itself is never read."""
    lengths_N = np.zeros(len(request), dtype=np.int64)
    judged = np.flatnonzero(request.position_counts_N)
    ends_N = np.cumsum(request.position_counts_N, dtype=np.int64)
    lengths_N[judged] = request.positions_P[ends_N[judged] - 1]
    return lengths_N


def _groups_of(request: ScoreRequest) -> list[_Group]:
    rows: dict[tuple[Signal, int], list[int]] = {}
    for i, kind in enumerate(zip(request.signals, request.k_N, strict=True)):
        rows.setdefault(kind, []).append(i)
    return [_Group(signal, k, members) for (signal, k), members in rows.items()]


def _named_ids(request: ScoreRequest, group: _Group) -> np.ndarray | None:
    """int32 [P, K]: the ids the caller named for the group's positions (`at_ids` only)."""
    if group.signal is not Signal.AT_IDS:
        return None
    sizes = np.array(
        [
            int(count) * k if signal is Signal.AT_IDS else 0
            for count, k, signal in zip(request.position_counts_N, request.k_N, request.signals, strict=True)
        ],
        dtype=np.int64,
    )
    return request.ids[ragged_ranges(exclusive_cumsum(sizes)[group.rows], sizes[group.rows])].reshape(
        -1, group.k
    )


def _in_request_order(
    request: ScoreRequest, groups: Sequence[_Group], columns: Sequence[_Columns]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(ids, logprobs, hidden, sampled), flat; one group is the usual case and costs no copy."""
    if len(groups) == 1:
        only = columns[0]
        return (
            np.empty(0, np.int32) if only.ids is None else only.ids.reshape(-1),
            np.empty(0, np.float32) if only.logprobs is None else only.logprobs.reshape(-1),
            np.empty(0, np.uint16) if only.hidden is None else only.hidden.reshape(-1),
            only.sampled,
        )
    parts: list[tuple[int, _Columns, slice]] = []
    for group, column in zip(groups, columns, strict=True):
        ends = np.cumsum(request.position_counts_N[group.rows], dtype=np.int64).tolist()
        starts = [0, *ends[:-1]]
        parts += [(row, column, slice(a, b)) for row, a, b in zip(group.rows, starts, ends, strict=True)]
    parts.sort(key=lambda part: part[0])
    ids = [c.ids[at].reshape(-1) for _, c, at in parts if c.ids is not None]
    logprobs = [c.logprobs[at].reshape(-1) for _, c, at in parts if c.logprobs is not None]
    hidden = [c.hidden[at].reshape(-1) for _, c, at in parts if c.hidden is not None]
    return (
        np.concatenate(ids) if ids else np.empty(0, np.int32),
        np.concatenate(logprobs) if logprobs else np.empty(0, np.float32),
        np.concatenate(hidden) if hidden else np.empty(0, np.uint16),
        np.concatenate([c.sampled[at] for _, c, at in parts]) if parts else np.empty(0, np.float32),
    )
