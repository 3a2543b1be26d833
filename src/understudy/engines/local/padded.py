"""The padded layout: rows padded to one length. Works with every model and device; used on a CPU.

Legend: B rows, T columns (left padding, prompt, generated tokens), V vocabulary.

Prompts are padded on the left, so that every row's newest token is in the same column. A batch's keys and
values are one block, so joining and dropping rows copies it. On a CPU, models that `cpu_forward.py`
supports use it; all other models use transformers' forward. A vision-language model gets the pictures of its
rows with their prompts, and decodes at positions that count a picture by its longer side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from understudy.engines.local import kv_padded as kv
from understudy.engines.local.rows import DecodingRow, DecodingRows, RowBatch
from understudy.media.processor import PictureReader
from understudy.nn.cpu_forward import cpu_forward
from understudy.nn.prefix_tree import prefix_tree
from understudy.nn.vision import is_vision, vision_rows
from understudy.nn.vision_features import VisionFeatures


class PaddedBatch:
    """A `RowBatch` over one block of keys and values."""

    def __init__(
        self,
        model: Any,
        decoding: DecodingRows,
        *,
        pad_id: int,
        device: torch.device,
        pictures: PictureReader | None = None,
        features: VisionFeatures | None = None,
    ) -> None:
        self._model, self._device, self.decoding = model, device, decoding
        self._pictures, self._features = pictures, features
        self._lay_out()
        most = self._mask_BT.shape[1]
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.cache: Cache = kv.new_cache(layers, self._width, most)
        self._choose_forward()
        ids = [row.ids for row in decoding.rows]
        self.logits_BV = (
            self._read_with_transformers(ids, pad_id)
            if self._cpu_forward is None
            else self._read_with_cpu_forward(ids)
        )

    def _read_with_cpu_forward(self, ids: list[np.ndarray]) -> Tensor:
        assert self._cpu_forward is not None
        lengths_B = self._width - self._pad_B
        return self._cpu_forward.prompts(prefix_tree(ids), lengths_B, self._additive_mask_BT, self.cache)

    def _read_with_transformers(self, ids: list[np.ndarray], pad_id: int) -> Tensor:
        tokens_BT = np.full((len(ids), self._width), pad_id, dtype=np.int64)
        for i, row in enumerate(ids):
            tokens_BT[i, self._pad_B[i] :] = row
        tokens = torch.from_numpy(tokens_BT).to(self._device)
        if is_vision(self._model):
            return self._read_pictures(tokens, ids)
        positions_BT = np.maximum(np.arange(self._width) - self._pad_B[:, None], 0)
        return self._forward(tokens, torch.from_numpy(positions_BT).to(self._device))

    def _read_pictures(self, tokens_BT: Tensor, ids: list[np.ndarray]) -> Tensor:
        rows = self.decoding.rows
        made = vision_rows(
            self._model,
            self._pictures,
            ids,
            [row.request.media for row in rows],
            self._width,
            left=True,
            keys=[row.request.key for row in rows],
            features=self._features,
        )
        for row, delta in zip(rows, made.deltas_B, strict=True):
            row.rope_delta = int(delta)
        self._place_next()
        positions = made.positions
        if positions is None:
            positions = torch.from_numpy(np.maximum(np.arange(self._width) - self._pad_B[:, None], 0))
        return self._forward(tokens_BT, positions.to(self._device), **made.arguments)

    def _lay_out(self) -> None:
        """Computes mask and positions of the current rows."""
        lengths_B = np.array([len(row) for row in self.decoding.rows])
        self._width = int(lengths_B.max())
        self._pad_B = self._width - lengths_B
        # The mask covers every token that may still come; each step uses a longer slice of it.
        mask_BT = np.arange(self._width + self.decoding.steps_left) >= self._pad_B[:, None]
        self._mask_BT = torch.from_numpy(mask_BT).to(self._device)
        self._place_next()

    def _place_next(self) -> None:
        """int64 [B, 1]: the position of each row's next token."""
        next_B = np.array([len(row) + row.rope_delta for row in self.decoding.rows])
        self._position_B1 = torch.from_numpy(next_B[:, None]).to(self._device)

    def _choose_forward(self) -> None:
        self._cpu_forward = cpu_forward(self._model, longest=self._mask_BT.shape[1])
        self._build_additive_mask()

    def _build_additive_mask(self) -> None:
        """0 where a token is, −inf in padding, for the CPU forward; None if no row has padding."""
        self._additive_mask_BT: Tensor | None = None
        if self._cpu_forward is not None and self._pad_B.any():
            zeros_BT = torch.zeros(self._mask_BT.shape, dtype=self._model.dtype, device=self._device)
            self._additive_mask_BT = zeros_BT.masked_fill_(~self._mask_BT, -torch.inf)

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, **pictures: Any) -> Tensor:
        output = self._model(
            input_ids=tokens_BT,
            attention_mask=self._mask_BT[:, : self._width],
            position_ids=positions_BT,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **pictures,
        )
        return output.logits[:, -1]

    @property
    def pads(self) -> np.ndarray:
        """Columns of padding of each row."""
        return self._pad_B

    def draw(self) -> list[DecodingRow]:
        return self.decoding.draw(self.logits_BV)

    def advance(self) -> None:
        if self.decoding.dropping_pays:
            self.release()
        self._width += 1
        if self._cpu_forward is None:
            self.logits_BV = self._forward(self.decoding.newest_B[:, None], self._position_B1)
        else:
            self.logits_BV = self._cpu_forward.step(
                self.decoding.newest_B, self._position_B1[:, 0], self._additive_mask_BT, self.cache
            )
        self._position_B1 = self._position_B1 + 1

    def release(self) -> None:
        if self.decoding.alive in (0, len(self.decoding.rows)):
            return
        keep = self.decoding.drop_ended()
        keep_B = torch.from_numpy(keep).to(self._device)
        skip = int(self._pad_B[keep].min())
        self._pad_B = self._pad_B[keep] - skip
        self._width -= skip
        self._mask_BT, self._position_B1 = self._mask_BT[keep_B, skip:], self._position_B1[keep_B]
        self._build_additive_mask()
        self.logits_BV = self.logits_BV[keep_B]
        kv.keep_rows(self.cache, keep_B, skip)

    def continue_under(self, version: int) -> None:
        self.decoding.version = version
        self._choose_forward()  # it keeps transposed copies of some weights

    def join(self, other: RowBatch) -> None:
        assert isinstance(other, PaddedBatch)
        self.release()
        self.decoding = self.decoding.joined(other.decoding)
        self._lay_out()
        self.cache = kv.merge(self.cache, other.cache, most=self._mask_BT.shape[1])
        self.logits_BV = torch.cat([self.logits_BV, other.logits_BV])
        self._choose_forward()
