"""The host-side record of rows being decoded: drawn tokens, ended rows and their stop reasons.

Legend: B rows, V vocabulary, N steps, K candidates.

`padded.py` and `slots.py` hold the keys and values. A step draws a token for each row from given logits and
copies tokens and logprobs to the host. That copy is the only wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from understudy.engines.base import Detokenize, GenerateRequest, Generation
from understudy.engines.local.kernels.draw import can_draw, draw_unfiltered
from understudy.engines.local.sampling import SamplingBatch, draw, shape_logits
from understudy.types.trajectory import StopReason
from understudy.types.usable_ids import UsableIds


@dataclass(slots=True)
class DecodingRow:
    """One request's progress. Tokens of the current batch are added when the row ends in it or leaves it."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)
    """int32 [n, K] of each batch the row was in; only if its request asks for candidates."""
    stop_reason: StopReason | None = None
    rope_delta: int = 0
    """Add to the row's length for the position of its next token (`nn/vision.py`)."""

    @property
    def ids(self) -> np.ndarray:
        """The whole context of the next token: prompt and generated tokens."""
        return np.concatenate([self.request.tokens, np.asarray(self.tokens, dtype=np.int32)])

    def __len__(self) -> int:
        return len(self.request.tokens) + len(self.tokens)

    def generation(self) -> Generation:
        return Generation(
            tokens=np.asarray(self.tokens, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            weight_versions=np.asarray(self.versions, dtype=np.int32),
            stop_reason=self.stop_reason or StopReason.ABORTED,
            candidate_ids=self._candidate_ids(),
        )

    def _candidate_ids(self) -> np.ndarray | None:
        wanted = self.request.sampling.candidates
        if not wanted:
            return None
        return np.concatenate([np.zeros((0, wanted), np.int32), *self.candidates])


@dataclass(frozen=True, slots=True)
class PendingDraw:
    """A draw whose result may still be copied to the host."""

    news_3B: Tensor
    """float64, on the host: token, logprob, whether it is a stop id."""
    arrived: torch.cuda.Event | None = None
    """Recorded after the copy; None if the result is on the host already."""


class RowBatch(Protocol):
    """Rows in flight, on the scheduler's thread. Creating one runs the prompts.

    `draw` appends a token to every row; `advance` computes the logits of the next draw. Between the two,
    rows may `end` early. Before a draw, another batch may `join`, and the model's weights may change
    (`continue_under`). Ended rows stay in the batch, unused, until enough have ended (`dropping_pays`) or
    `release` is called.
    """

    decoding: DecodingRows

    def draw(self) -> list[DecodingRow]: ...

    def advance(self) -> None: ...

    def release(self) -> None: ...

    def join(self, other: RowBatch) -> None: ...

    def continue_under(self, version: int) -> None:
        """The model holds the weights of `version` now. The keys and values computed so far stay."""
        ...


class DecodingRows:
    """The rows that one batch decodes, their sampling state and their drawn tokens. Used on the scheduler's
    thread."""

    def __init__(
        self,
        rows: Sequence[DecodingRow],
        *,
        version: int,
        vocab: int,
        device: torch.device,
        detokenize: Detokenize | None,
    ) -> None:
        self.rows, self.version = list(rows), version
        self._logits_version_B = np.full(len(rows), version, dtype=np.int32)
        """The weights that computed the logits of the next draw."""
        self._vocab, self._device, self._detokenize = vocab, device, detokenize
        settings = [row.request.sampling for row in rows]
        written = [len(row.tokens) for row in rows]
        self._has_stop_strings = any(setting.stop_strings for setting in settings)
        self._alive_B = np.ones(len(rows), dtype=bool)
        self._left_B = np.array(
            [s.max_new_tokens - w for s, w in zip(settings, written, strict=True)], dtype=np.int64
        )
        self.steps_left = int(self._left_B.max())
        self._step = 0
        self._tokens_NB = np.zeros((self.steps_left, len(rows)), dtype=np.int32)
        self._logprobs_NB = np.zeros((self.steps_left, len(rows)), dtype=np.float32)
        self._versions_NB = np.zeros((self.steps_left, len(rows)), dtype=np.int32)
        self._candidates = max(setting.candidates for setting in settings)
        self._candidates_NBK = np.zeros((self.steps_left, len(rows), self._candidates), dtype=np.int32)
        self._drawn_ids, self._unusable_BV = _usable_ids([s.usable for s in settings], vocab, device)
        self._sampling = SamplingBatch.build(
            settings, [row.request.seed for row in rows], written, self._drawn_ids, device
        )
        penalised = self._sampling.penalty_B1 is not None
        self._seen_BV = _seen(rows, self._drawn_ids, device) if penalised else None
        self.newest_B = torch.zeros(len(rows), dtype=torch.int64, device=device)
        """The tokens of the last draw."""

    @property
    def alive(self) -> int:
        """Rows that have not ended."""
        return int(self._alive_B.sum())

    @property
    def dropping_pays(self) -> bool:
        """True once an eighth of the rows has ended; depends on the rows alone, so it is deterministic."""
        return 8 * (len(self.rows) - self.alive) >= len(self.rows)

    @property
    def continues(self) -> bool:
        """Between `begin_draw` and `end_draw`: whether any row may get a token after the one being drawn."""
        return bool((self._left_B[self._alive_B] > self._step + 1).any())

    def draw(self, logits_BV: Tensor) -> list[DecodingRow]:
        """Appends one token to every row; returns the rows that ended with it."""
        return self.end_draw(self.begin_draw(logits_BV))

    def begin_draw(self, logits_BV: Tensor) -> PendingDraw:
        """The device's part: sets `newest_B` to the drawn tokens and starts their copy to the host."""
        if self._drawn_ids < logits_BV.shape[1]:
            logits_BV = logits_BV[:, : self._drawn_ids]
        if self._unusable_BV is not None:
            logits_BV = logits_BV.masked_fill(self._unusable_BV, -torch.inf)
        if can_draw(logits_BV, self._sampling):
            tokens_B, logprobs_B = draw_unfiltered(logits_BV, self._sampling, self._step)
        else:
            shaped_BV = shape_logits(logits_BV, self._sampling, self._seen_BV)
            tokens_B, logprobs_B = draw(shaped_BV, self._sampling, self._step)
        self.newest_B = tokens_B
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, tokens_B[:, None], True)
        stopped_B = (tokens_B[:, None] == self._sampling.stop_ids_BS).any(-1)
        if self._candidates:
            best_BK = logits_BV.topk(self._candidates, dim=-1).indices
            self._candidates_NBK[self._step] = best_BK.int().cpu().numpy()
        # One copy for everything the host needs; float64 holds every id and every fp32 logprob exactly.
        news_3B = torch.stack([tokens_B.double(), logprobs_B.double(), stopped_B.double()])
        if not news_3B.is_cuda:
            return PendingDraw(news_3B)
        host_3B = torch.empty(news_3B.shape, dtype=news_3B.dtype, pin_memory=True)
        host_3B.copy_(news_3B, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return PendingDraw(host_3B, arrived)

    def end_draw(self, drawn: PendingDraw) -> list[DecodingRow]:
        """The host's part: waits for the copy, then returns the rows that ended."""
        if drawn.arrived is not None:
            drawn.arrived.synchronize()
        news_3B = drawn.news_3B.numpy()
        self._tokens_NB[self._step], self._logprobs_NB[self._step] = news_3B[0], news_3B[1]
        self._versions_NB[self._step] = self._logits_version_B
        # Weights change between turns only, so the weights of this version compute the next logits.
        self._logits_version_B[:] = self.version
        self._step += 1
        return self._end_rows(news_3B[2] > 0)

    def _end_rows(self, stopped_B: np.ndarray) -> list[DecodingRow]:
        full_B, has_stop_string_B = self._left_B <= self._step, self._stop_strings_B()
        ended = np.flatnonzero(self._alive_B & (stopped_B | full_B | has_stop_string_B))
        for i in ended:
            self._collect(i)
            if stopped_B[i]:
                self.rows[i].stop_reason = StopReason.EOS
            else:
                self.rows[i].stop_reason = (
                    StopReason.STOP_STRING if has_stop_string_B[i] else StopReason.LENGTH
                )
            self._alive_B[i] = False
        return [self.rows[i] for i in ended]

    def _stop_strings_B(self) -> np.ndarray:
        """Which rows have just completed one of their stop strings."""
        has_stop_string_B = np.zeros(len(self.rows), dtype=bool)
        if self._detokenize is None or not self._has_stop_strings:
            return has_stop_string_B
        for i in np.flatnonzero(self._alive_B):
            row = self.rows[i]
            stops = row.request.sampling.stop_strings
            if not stops:
                continue
            # A character is at most four byte tokens, so this many of the newest tokens hold the whole string.
            window = 4 * max(map(len, stops)) + 4
            drawn = self._tokens_NB[max(self._step - window, 0) : self._step, i].tolist()
            before = row.tokens[max(len(row.tokens) + len(drawn) - window, 0) :]
            text = self._detokenize([*before, *drawn])
            has_stop_string_B[i] = any(stop in text for stop in stops)
        return has_stop_string_B

    def _collect(self, i: np.integer) -> None:
        """Appends row i's tokens of this batch to the row."""
        row = self.rows[i]
        row.tokens.extend(self._tokens_NB[: self._step, i].tolist())
        row.logprobs.extend(self._logprobs_NB[: self._step, i].tolist())
        row.versions.extend(self._versions_NB[: self._step, i].tolist())
        if wanted := row.request.sampling.candidates:
            row.candidates.append(self._candidates_NBK[: self._step, i, :wanted].copy())

    def end(self, which: Callable[[DecodingRow], bool] = lambda row: True) -> list[DecodingRow]:
        """Ends the selected rows (all by default) and returns them, each with all its tokens."""
        ended = [i for i in np.flatnonzero(self._alive_B) if which(self.rows[i])]
        for i in ended:
            self._collect(i)
        self._alive_B[ended] = False
        return [self.rows[i] for i in ended]

    def drop_ended(self) -> np.ndarray:
        """Drops the rows that have ended; returns the indices of those that stay."""
        keep = np.flatnonzero(self._alive_B)
        keep_B = torch.from_numpy(keep).to(self._device)
        self.rows = [self.rows[i] for i in keep]
        self._alive_B, self._left_B = self._alive_B[keep], self._left_B[keep]
        self._tokens_NB, self._logprobs_NB = self._tokens_NB[:, keep], self._logprobs_NB[:, keep]
        self._versions_NB, self._logits_version_B = self._versions_NB[:, keep], self._logits_version_B[keep]
        self._candidates_NBK = self._candidates_NBK[:, keep]
        self.newest_B, self._sampling = self.newest_B[keep_B], self._sampling.select(keep_B)
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV[keep_B]
        if self._unusable_BV is not None:
            self._unusable_BV = self._unusable_BV[keep_B]
        return keep

    def joined(self, other: DecodingRows) -> DecodingRows:
        """A new record of the rows of both batches that have not ended."""
        versions = [one._logits_version_B[one._alive_B] for one in (self, other)]
        rows = [*self.end(), *other.end()]
        joined = DecodingRows(
            rows, version=self.version, vocab=self._vocab, device=self._device, detokenize=self._detokenize
        )
        joined._logits_version_B = np.concatenate(versions)
        return joined


def _usable_ids(
    usable: Sequence[UsableIds | None], vocab: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """The number of ids to draw from, and a mask [B, ids] of ids forbidden per row; None if none is."""
    limits = [vocab if one is None else min(one.limit, vocab) for one in usable]
    most = max(limits)
    if min(limits) == most and not any(one is not None and one.holes for one in usable):
        return most, None
    mask_BV = np.zeros((len(usable), most), dtype=bool)
    for i, (one, limit) in enumerate(zip(usable, limits, strict=True)):
        mask_BV[i, limit:] = True
        if one is not None:
            mask_BV[i, [hole for hole in one.holes if hole < most]] = True
    return most, torch.from_numpy(mask_BV).to(device)


def _seen(rows: Sequence[DecodingRow], vocab: int, device: torch.device) -> Tensor:
    """Marks the ids in each row's prompt and generation so far."""
    seen_BV = np.zeros((len(rows), vocab), dtype=bool)
    for i, row in enumerate(rows):
        seen_BV[i, row.ids[row.ids < vocab]] = True
    return torch.from_numpy(seen_BV).to(device)
