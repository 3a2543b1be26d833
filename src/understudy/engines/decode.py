"""Rows being written together, one token each per step.

Legend: B rows, T columns (left padding, prompt, what was written), V vocabulary, N new tokens.

Prompts are padded on the left so that every row's newest token sits in the same column. A step draws a token for
each row from the logits at hand, fetches tokens and logprobs (the only wait for the device), and runs the model on
the new tokens. Rows that ended stay in the batch, unread, until dropping them pays; when that is depends on the rows
alone, so the same batch always computes the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from understudy.engines import kv
from understudy.engines.base import GenerateRequest, Generation
from understudy.engines.sampling import SamplingBatch, draw, shape_logits
from understudy.types.trajectory import StopReason

Detokenize = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Row:
    """One request's progress. What the steps of a `DecodeBatch` under way wrote is added when the row leaves it."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None

    @property
    def ids(self) -> np.ndarray:
        """Everything the model must see to write the next token."""
        return np.concatenate([self.request.tokens, np.asarray(self.tokens, dtype=np.int32)])

    def generation(self) -> Generation:
        return Generation(
            tokens=np.asarray(self.tokens, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            weight_versions=np.asarray(self.versions, dtype=np.int32),
            stop_reason=self.stop_reason or StopReason.ABORTED,
        )


class DecodeBatch:
    """Rows in flight under one weight version; building it runs their ids through the model.

    Call `draw` to write a token on every row, then `advance` to make the next draw possible; between the two rows may
    `end` early, and before a draw another batch may `join`.
    """

    def __init__(
        self,
        model: Any,
        rows: Sequence[Row],
        *,
        version: int,
        pad_id: int,
        device: torch.device,
        detokenize: Detokenize | None = None,
    ) -> None:
        self._model, self.version, self._device, self._detokenize = model, version, device, detokenize
        self._lay_out(rows)
        tokens_BT = np.full((len(self.rows), self._width), pad_id, dtype=np.int64)
        for i, row in enumerate(self.rows):
            tokens_BT[i, self._pad_B[i] :] = row.ids
        positions_BT = np.maximum(np.arange(self._width) - self._pad_B[:, None], 0)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._cache: Cache = kv.new_cache(layers, room=self._mask_BT.shape[1])
        self._logits_BV = self._forward(
            torch.from_numpy(tokens_BT).to(device), torch.from_numpy(positions_BT).to(device)
        )

    def _lay_out(self, rows: Sequence[Row]) -> None:
        """Everything about the rows but keys, values and logits: step buffers, settings, mask and positions."""
        self.rows = list(rows)
        lengths_B = np.array([len(row.request.tokens) + len(row.tokens) for row in rows])
        settings = [row.request.sampling for row in rows]
        written = [len(row.tokens) for row in rows]
        self._has_stop_strings = any(setting.stop_strings for setting in settings)
        vocab: int = self._model.get_output_embeddings().weight.shape[0]

        self._alive_B = np.ones(len(rows), dtype=bool)
        self._left_B = np.array([s.max_new_tokens - w for s, w in zip(settings, written, strict=True)])
        self._step, steps = 0, int(self._left_B.max())
        self._tokens_NB = np.zeros((steps, len(rows)), dtype=np.int32)
        self._logprobs_NB = np.zeros((steps, len(rows)), dtype=np.float32)

        seeds = [row.request.seed for row in rows]
        self._sampling = SamplingBatch.build(settings, seeds, written, vocab, self._device)
        self._seen_BV = _seen(rows, vocab, self._device) if self._sampling.penalty_B1 is not None else None

        self._width = int(lengths_B.max())
        self._pad_B = self._width - lengths_B
        # The mask has room for every token that may come; each step sees a longer slice of it.
        mask_BT = np.arange(self._width + steps) >= self._pad_B[:, None]
        self._mask_BT = torch.from_numpy(mask_BT).to(self._device)
        self._position_B1 = torch.from_numpy(lengths_B[:, None]).to(self._device)

    @property
    def alive(self) -> int:
        """Rows that have not ended."""
        return int(self._alive_B.sum())

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        output = self._model(
            input_ids=tokens_BT,
            attention_mask=self._mask_BT[:, : self._width],
            position_ids=positions_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def draw(self) -> list[Row]:
        """Writes one token on every row; returns the rows that ended with it."""
        shaped_BV = shape_logits(self._logits_BV, self._sampling, self._seen_BV)
        tokens_B, logprobs_B = draw(shaped_BV, self._sampling, self._step)
        self._newest_B = tokens_B
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, tokens_B[:, None], True)
        stopped_B = (tokens_B[:, None] == self._sampling.stop_ids_BS).any(-1)
        # One fetch for everything the host must know; float64 holds every id and every fp32 logprob exactly.
        news_3B = torch.stack([tokens_B.double(), logprobs_B.double(), stopped_B.double()]).cpu().numpy()
        self._tokens_NB[self._step], self._logprobs_NB[self._step] = news_3B[0], news_3B[1]
        self._step += 1
        return self._end_rows(news_3B[2] > 0)

    def _end_rows(self, stopped_B: np.ndarray) -> list[Row]:
        full_B = self._left_B <= self._step
        ended = np.flatnonzero(self._alive_B & (stopped_B | full_B | self._stop_strings_B()))
        for i in ended:
            self._collect(i)
            if stopped_B[i]:
                self.rows[i].stop_reason = StopReason.EOS
            else:
                self.rows[i].stop_reason = StopReason.LENGTH if full_B[i] else StopReason.STOP_STRING
            self._alive_B[i] = False
        return [self.rows[i] for i in ended]

    def _stop_strings_B(self) -> np.ndarray:
        """Which rows have just completed one of their stop strings."""
        said_B = np.zeros(len(self.rows), dtype=bool)
        if self._detokenize is None or not self._has_stop_strings:
            return said_B
        for i in np.flatnonzero(self._alive_B):
            row = self.rows[i]
            stops = row.request.sampling.stop_strings
            if not stops:
                continue
            # A character is at most four byte tokens, so this many of the newest tokens hold the whole string.
            window = 4 * max(map(len, stops)) + 4
            newest = [*row.tokens, *self._tokens_NB[: self._step, i].tolist()][-window:]
            text = self._detokenize(newest)
            said_B[i] = any(stop in text for stop in stops)
        return said_B

    def _collect(self, i: np.integer) -> None:
        """Moves what row i wrote in this batch onto the row."""
        row = self.rows[i]
        row.tokens.extend(self._tokens_NB[: self._step, i].tolist())
        row.logprobs.extend(self._logprobs_NB[: self._step, i].tolist())
        row.versions.extend([self.version] * self._step)

    def end(self, which: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        """Stops writing on the rows named (all by default); returns them, each with everything it wrote."""
        ended = [i for i in np.flatnonzero(self._alive_B) if which(self.rows[i])]
        for i in ended:
            self._collect(i)
        self._alive_B[ended] = False
        return [self.rows[i] for i in ended]

    def join(self, other: DecodeBatch) -> None:
        """Takes in the rows of another batch of the same version that is ready to draw, as this one is."""
        if self.alive < len(self.rows):
            self._drop_ended()
        rows = [*self.end(), *other.end()]
        cache, logits_BV = self._cache, self._logits_BV
        self._lay_out(rows)
        self._cache = kv.merge(cache, other._cache, room=self._mask_BT.shape[1])
        self._logits_BV = torch.cat([logits_BV, other._logits_BV])

    def advance(self) -> None:
        """Runs the model on the tokens just drawn, without the ended rows once an eighth of the batch has ended.

        Dropping copies the cache of the others, so it is not done for every row that ends.
        """
        if 8 * (len(self.rows) - self.alive) >= len(self.rows):
            self._drop_ended()
        self._width += 1
        self._logits_BV = self._forward(self._newest_B[:, None], self._position_B1)
        self._position_B1 = self._position_B1 + 1

    def _drop_ended(self) -> None:
        keep = np.flatnonzero(self._alive_B)
        keep_B = torch.from_numpy(keep).to(self._device)
        skip = int(self._pad_B[keep].min())
        self.rows = [self.rows[i] for i in keep]
        self._alive_B, self._left_B, self._pad_B = (
            self._alive_B[keep],
            self._left_B[keep],
            self._pad_B[keep] - skip,
        )
        self._tokens_NB, self._logprobs_NB = self._tokens_NB[:, keep], self._logprobs_NB[:, keep]
        self._width -= skip
        self._mask_BT, self._position_B1 = self._mask_BT[keep_B, skip:], self._position_B1[keep_B]
        self._newest_B, self._logits_BV = self._newest_B[keep_B], self._logits_BV[keep_B]
        self._sampling = self._sampling.select(keep_B)
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV[keep_B]
        kv.keep_rows(self._cache, keep_B, skip)


def _seen(rows: Sequence[Row], vocab: int, device: torch.device) -> Tensor:
    """Marks the ids in each row's prompt and generation so far."""
    seen_BV = np.zeros((len(rows), vocab), dtype=bool)
    for i, row in enumerate(rows):
        seen_BV[i, row.ids] = True
    return torch.from_numpy(seen_BV).to(device)
