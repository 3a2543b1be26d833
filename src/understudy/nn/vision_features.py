"""Features of pictures, kept by hash while the vision tower does not change: once for all rows that show a picture.

Each picture goes through the tower alone. So its features depend on the picture and not on the batch, and it makes
no difference to the bit whether they were kept. The latest ones are kept in host memory, up to a bound.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from understudy.media.processor import QWEN, PictureReader, vision_family

_ARGUMENT = "mm_encoder_outputs"
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PictureFeatures:
    """What the language part gets of one picture."""

    pooled: torch.Tensor
    """[placeholders, hidden]."""
    deepstack: tuple[torch.Tensor, ...]
    """Of the same shape: added to the states of the first layers (Qwen3-VL)."""
    grid: np.ndarray | None
    """int64 [1, 3] (Qwen): patches in time, height and width."""

    @property
    def bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in (self.pooled, *self.deepstack))


def features_for(model: Any, reader: PictureReader | None) -> VisionFeatures | None:
    """None if the model reads no pictures, or cannot take features in this version of transformers."""
    if reader is None or _ARGUMENT not in inspect.signature(type(model.base_model).forward).parameters:
        return None
    return VisionFeatures(reader)


class VisionFeatures:
    """The features of one model. Its owner calls `clear` when the weights of the vision tower may have changed.
    Used by any thread."""

    def __init__(self, reader: PictureReader, most_bytes: int = MOST_BYTES) -> None:
        self._reader, self._most = reader, most_bytes
        self._kept: OrderedDict[str, PictureFeatures] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0
        self.computed = 0
        """Pictures that went through the tower."""

    def of(self, model: Any, name: str) -> PictureFeatures:
        with self._lock:
            if (found := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
                return found
        made = self._compute(model, name)
        with self._lock:
            self.computed += 1
            if name not in self._kept:
                self._kept[name] = made
                self.held_bytes += made.bytes
            while self.held_bytes > self._most and len(self._kept) > 1:
                self.held_bytes -= self._kept.popitem(last=False)[1].bytes
        return made

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self.held_bytes = 0

    def _compute(self, model: Any, name: str) -> PictureFeatures:
        arrays = self._reader.arrays(name)
        qwen = vision_family(model.config) in QWEN
        device = model.get_input_embeddings().weight.device
        given = {key: torch.from_numpy(array).to(device) for key, array in arrays.items()}
        if not qwen:
            given = {key: tiles[None] for key, tiles in given.items()}  # the tiles of one "batch"
        # Not as an inference tensor: a later backward may read them.
        with torch.inference_mode(False), torch.no_grad():
            found = model.base_model.get_image_features(**given, return_dict=True)
            pooled = torch.cat(tuple(found.pooler_output)).cpu()
            deepstack = tuple(torch.cat(tuple(one)).cpu() for one in getattr(found, "deepstack_features", ()))
        return PictureFeatures(pooled, deepstack, arrays["image_grid_thw"] if qwen else None)


def feature_arguments(pictures: Sequence[PictureFeatures], device: torch.device) -> dict[str, Any]:
    """The arguments of a forward over rows with these pictures, in the order of their placeholders."""
    pooled = tuple(one.pooled.to(device) for one in pictures)
    layers = zip(*(one.deepstack for one in pictures), strict=True)
    deepstack = [tuple(one.to(device) for one in layer) for layer in layers]
    return {_ARGUMENT: {"image": SimpleNamespace(pooler_output=pooled, deepstack_features=deepstack)}}
