"""What a vision-language model takes for a batch of padded rows: pixels and positions.

A Qwen model has three rotary axes (time, height, width). Text advances all of them by one; a picture advances
them by its longer side, so positions after a picture are smaller than indexes in the row. `rope_delta` is that
difference, and decoding adds it. Positions are computed per row and handed to the model, which would
otherwise keep those of its last call. SmolVLM and Idefics3 have plain positions.

Legend: B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from understudy.errors import DataError
from understudy.media.processor import QWEN, PictureReader, vision_family
from understudy.nn.vision_features import VisionFeatures, feature_arguments, joined_pictures


def is_vision(model: Any) -> bool:
    return vision_family(model.config) is not None


def language_part(model: Any) -> nn.Module:
    """The decoder of a vision-language model."""
    body = model.base_model
    part = getattr(body, "language_model", None) or getattr(body, "text_model", None)
    assert isinstance(part, nn.Module)
    return part


def freeze_vision(model: Any) -> None:
    """Leaves only the language part and the head to be trained."""
    for parameter in vision_parameters(model):
        parameter.requires_grad_(False)


def is_vision_frozen(model: Any) -> bool:
    return not any(parameter.requires_grad for parameter in vision_parameters(model))


def vision_parameters(model: Any) -> list[nn.Parameter]:
    """Those of the vision tower and of its projection into the language part."""
    others = {id(one) for one in language_part(model).parameters()}
    others |= {id(one) for one in model.get_output_embeddings().parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in others]


@dataclass(frozen=True, slots=True)
class VisionRows:
    """The extra arguments of a forward over padded rows, and each row's `rope_delta`."""

    arguments: dict[str, Any]
    """`pixel_values` and the like, or features in their place; absent without pictures."""
    positions: torch.Tensor | None
    """int64 [3, B, T] (Qwen), on the left of the padding; None: the model's own."""
    deltas_B: np.ndarray
    """int64 [B]: add to a row's length for the position of its next token."""


def vision_rows(
    model: Any,
    reader: PictureReader | None,
    rows: Sequence[np.ndarray],
    media: Sequence[tuple[str, ...]],
    width: int,
    *,
    left: bool = False,
    keys: Sequence[str] = (),
    features: VisionFeatures | None = None,
) -> VisionRows:
    """`rows`: the ids of each row, without padding; `left`: whether the padding is. The pictures of all rows
    are concatenated in the order of rows, which is the order of their placeholders. `features`: where those of
    the pictures are kept; None: the forward computes them from pixels."""
    device = next(model.parameters()).device
    qwen = vision_family(model.config) in QWEN
    if any(media) and reader is None:
        raise DataError("rows hold pictures, and this process was started without a store of pictures")
    shown: list[tuple[str, ...]] = [()] * len(rows)
    if reader is not None:
        shown = [
            reader.within(keys[i] if keys else str(i), ids, names)
            for i, (ids, names) in enumerate(zip(rows, media, strict=True))
        ]
    names = [name for own in shown for name in own]
    arguments: dict[str, Any] = {}
    grids: dict[str, Any] = {}
    if names and features is not None:
        found = features.of(model, names)
        arguments = feature_arguments([found[name] for name in names], device)
        grids = {name: one.grid for name, one in found.items()}
    elif names and reader is not None:
        arrays = reader.arrays(names)
        arguments = joined_pictures([arrays[name] for name in names], device, qwen)
        grids = {name: own.get("image_grid_thw") for name, own in arrays.items()}
    deltas_B = np.zeros(len(rows), dtype=np.int64)
    positions = None
    if qwen:
        placed = np.zeros((3, len(rows), width), dtype=np.int64)
        for i, (ids, own) in enumerate(zip(rows, shown, strict=True)):
            places, deltas_B[i] = _row_positions(model, ids, [grids[name] for name in own])
            start = width - len(ids) if left else 0
            placed[:, i, start : start + len(ids)] = places
            if not left:  # the padding's states are never read
                placed[:, i, len(ids) :] = np.arange(width - len(ids)) + len(ids) + deltas_B[i]
        positions = torch.from_numpy(placed).to(device)
    return VisionRows(arguments, positions, deltas_B)


def _row_positions(model: Any, ids: np.ndarray, grids: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """int64 [3, T] and the row's `rope_delta`, by the model's own rule."""
    if not grids:
        return np.broadcast_to(np.arange(len(ids)), (3, len(ids))), 0
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    kinds = (tokens == model.config.image_token_id).int()
    grid = torch.from_numpy(np.concatenate(list(grids)))
    positions, deltas = model.base_model.get_rope_index(
        tokens, mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=torch.ones_like(tokens)
    )
    return positions[:, 0].numpy(), int(deltas[0, 0])
