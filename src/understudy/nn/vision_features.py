"""Features of pictures, kept by hash while the vision tower does not change: once for all rows that show a picture.

Pictures that are new go through the tower together, as many as `TOKENS_TOGETHER` allows. Their last bits then depend on
which were new together. Under `determinism = "full"` each goes alone: its features depend on the picture and not on the
batch, and it makes no difference to the bit whether they were kept. The latest ones are kept in host memory, up to a
bound.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from understudy.media.processor import QWEN, PictureReader, vision_family

_ARGUMENT = "mm_encoder_outputs"
MOST_BYTES = 1 << 30
TOKENS_TOGETHER = 2048
"""The most placeholders of pictures that go through the tower in one forward: some 40 to 80 MB of pixels."""


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


def features_for(model: Any, reader: PictureReader | None, *, together: bool) -> VisionFeatures | None:
    """None if the model reads no pictures, or cannot take features in this version of transformers. `together`: new
    pictures share forwards of the tower."""
    if reader is None or not takes_features(model):
        return None
    return VisionFeatures(reader, together=together)


def takes_features(model: Any) -> bool:
    """Whether the model takes features in place of pixels. Versions of transformers that do not know the argument
    ignore it."""
    return _ARGUMENT in inspect.signature(type(model.base_model).forward).parameters


class VisionFeatures:
    """The features of one model. Its owner calls `clear` when the weights of the vision tower may have changed.
    Used by any thread."""

    def __init__(
        self, reader: PictureReader, *, together: bool = False, most_bytes: int = MOST_BYTES
    ) -> None:
        self._reader, self._together, self._most = reader, together, most_bytes
        self._kept: OrderedDict[str, PictureFeatures] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0
        self.computed = 0
        """Pictures that went through the tower."""
        self.forwards = 0
        """Forwards of the tower."""

    def of(self, model: Any, names: Sequence[str]) -> dict[str, PictureFeatures]:
        """The features of these pictures by name."""
        found = {}
        with self._lock:
            for name in names:
                if (kept := self._kept.get(name)) is not None:
                    self._kept.move_to_end(name)
                    found[name] = kept
        new = [name for name in dict.fromkeys(names) if name not in found]
        for chunk in self._chunks(new):
            arrays = self._reader.arrays(chunk)
            for group in [chunk] if self._together else [[name] for name in chunk]:
                made = self._forward(model, {name: arrays[name] for name in group})
                self._keep(made)
                found |= made
        return found

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self.held_bytes = 0

    def _keep(self, made: dict[str, PictureFeatures]) -> None:
        with self._lock:
            self.computed += len(made)
            for name, one in made.items():
                if name not in self._kept:
                    self._kept[name] = one
                    self.held_bytes += one.bytes
            while self.held_bytes > self._most and len(self._kept) > 1:
                self.held_bytes -= self._kept.popitem(last=False)[1].bytes

    def _chunks(self, names: Sequence[str]) -> Iterator[list[str]]:
        """In order; of at most `TOKENS_TOGETHER` placeholders, or one picture with more."""
        chunk: list[str] = []
        tokens = 0
        for name in names:
            more = self._reader.count(name)
            if chunk and tokens + more > TOKENS_TOGETHER:
                yield chunk
                chunk, tokens = [], 0
            chunk.append(name)
            tokens += more
        if chunk:
            yield chunk

    def _forward(self, model: Any, arrays: Mapping[str, dict[str, np.ndarray]]) -> dict[str, PictureFeatures]:
        """One forward of the tower."""
        qwen = vision_family(model.config) in QWEN
        given = joined_pictures(list(arrays.values()), model.get_input_embeddings().weight.device, qwen)
        # Not as an inference tensor: a later backward may read them.
        with torch.inference_mode(False), torch.no_grad():
            found = model.base_model.get_image_features(**given, return_dict=True)
            layers = [found.pooler_output, *getattr(found, "deepstack_features", ())]
            joined = [torch.cat(tuple(one)).cpu() for one in layers]
        self.forwards += 1
        counts = [self._reader.count(name) for name in arrays] if len(arrays) > 1 else [len(joined[0])]
        if sum(counts) != len(joined[0]):
            # SmolVLM and Idefics3 leave out tiles whose pixels are all zero; SmolVLM keeps one if all are.
            alone = [self._forward(model, {name: own}) for name, own in arrays.items()]
            return {name: one for made in alone for name, one in made.items()}
        # Copies, so that the features of one picture do not hold the memory of all.
        split = zip(*([one.clone() for one in layer.split(counts)] for layer in joined), strict=True)
        return {
            name: PictureFeatures(pooled, tuple(deepstack), own.get("image_grid_thw"))
            for (name, own), (pooled, *deepstack) in zip(arrays.items(), split, strict=True)
        }


def joined_pictures(
    pictures: Sequence[dict[str, np.ndarray]], device: torch.device, qwen: bool
) -> dict[str, torch.Tensor]:
    """The model's arguments for several pictures, from the arrays of each."""
    found = {}
    for name in pictures[0]:
        joined = torch.from_numpy(np.concatenate([one[name] for one in pictures])).to(device)
        found[name] = joined if qwen else joined[None]  # tiles of one "batch"; the model flattens them again
    return found


def feature_arguments(pictures: Sequence[PictureFeatures], device: torch.device) -> dict[str, Any]:
    """The arguments of a forward over rows with these pictures, in the order of their placeholders."""
    pooled = torch.cat([one.pooled for one in pictures]).to(device)
    layers = zip(*(one.deepstack for one in pictures), strict=True)
    deepstack = [(torch.cat(layer).to(device),) for layer in layers]
    return {_ARGUMENT: {"image": SimpleNamespace(pooler_output=(pooled,), deepstack_features=deepstack)}}
