"""Rows padded to one length: works with every model and device; what a CPU uses.

Legend: B rows, T columns (left padding, prompt, what was written), V vocabulary.

Prompts are padded on the left so that every row's newest token sits in the same column. Keys and values of a batch are
one block, so joining and dropping rows copies it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from understudy.engines import kv
from understudy.engines.writing import Row, RowBatch, Writing


class PaddedBatch:
    """A `RowBatch` over transformers' own attention."""

    def __init__(self, model: Any, writing: Writing, *, pad_id: int, device: torch.device) -> None:
        self._model, self._device, self.writing = model, device, writing
        self._lay_out()
        rows = writing.rows
        tokens_BT = np.full((len(rows), self._width), pad_id, dtype=np.int64)
        for i, row in enumerate(rows):
            tokens_BT[i, self._pad_B[i] :] = row.ids
        positions_BT = np.maximum(np.arange(self._width) - self._pad_B[:, None], 0)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.cache: Cache = kv.new_cache(layers, self._width, most=self._mask_BT.shape[1])
        self.logits_BV = self._forward(
            torch.from_numpy(tokens_BT).to(device), torch.from_numpy(positions_BT).to(device)
        )

    def _lay_out(self) -> None:
        """Mask and positions of the rows as they are now."""
        lengths_B = np.array([len(row) for row in self.writing.rows])
        self._width = int(lengths_B.max())
        self._pad_B = self._width - lengths_B
        # The mask has room for every token that may come; each step sees a longer slice of it.
        mask_BT = np.arange(self._width + self.writing.steps_left) >= self._pad_B[:, None]
        self._mask_BT = torch.from_numpy(mask_BT).to(self._device)
        self._position_B1 = torch.from_numpy(lengths_B[:, None]).to(self._device)

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        output = self._model(
            input_ids=tokens_BT,
            attention_mask=self._mask_BT[:, : self._width],
            position_ids=positions_BT,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    @property
    def pads(self) -> np.ndarray:
        """How many columns of padding each row has."""
        return self._pad_B

    def draw(self) -> list[Row]:
        return self.writing.draw(self.logits_BV)

    def advance(self) -> None:
        if self.writing.dropping_pays:
            self.release()
        self._width += 1
        self.logits_BV = self._forward(self.writing.newest_B[:, None], self._position_B1)
        self._position_B1 = self._position_B1 + 1

    def release(self) -> None:
        if self.writing.alive in (0, len(self.writing.rows)):
            return
        keep = self.writing.keep_alive()
        keep_B = torch.from_numpy(keep).to(self._device)
        skip = int(self._pad_B[keep].min())
        self._pad_B = self._pad_B[keep] - skip
        self._width -= skip
        self._mask_BT, self._position_B1 = self._mask_BT[keep_B, skip:], self._position_B1[keep_B]
        self.logits_BV = self.logits_BV[keep_B]
        kv.keep_rows(self.cache, keep_B, skip)

    def join(self, other: RowBatch) -> None:
        assert isinstance(other, PaddedBatch)
        self.release()
        self.writing = self.writing.joined(other.writing)
        self._lay_out()
        self.cache = kv.merge(self.cache, other.cache, most=self._mask_BT.shape[1])
        self.logits_BV = torch.cat([self.logits_BV, other.logits_BV])
