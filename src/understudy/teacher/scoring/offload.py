"""Decoder layers in host memory, moved to the device for every forward (`teachers.NAME.offload`).

    host    │ layer 5 │ layer 6 │ layer 7 │   pinned, each layer one block of bytes
                 └────────┐└────────┐           copies, on a stream of their own
    device  layers 0 … 4  │ block 0 │ block 1 │ head

The last layers are offloaded. While layer i computes in one block, layer i + 1 is copied into the other. Weights arrive as they
are, and the operations are the same, so scores are equal to the bit to those without offloading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from understudy.errors import TeacherError
from understudy.nn.vision import is_vision
from understudy.teacher.scoring.model import FrozenModel

ALL = "all"
_ALIGNED = 256
"""Bytes: kernels expect weights at such addresses."""


class _OffloadedLayer:
    """The tensors of one layer as views of a block of host memory, and as views of a block on the device."""

    def __init__(self, layer: nn.Module, pinned: bool) -> None:
        self.tensors = [*layer.parameters(), *layer.buffers()]
        self.size = sum(_rounded(tensor.nbytes) for tensor in self.tensors)
        self.host = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned)
        self.host_views = self.views_of(self.host)
        for tensor, view in zip(self.tensors, self.host_views, strict=True):
            view.copy_(tensor)
            tensor.data = view

    def views_of(self, block: Tensor) -> list[Tensor]:
        found, start = [], 0
        for tensor in self.tensors:
            found.append(block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += _rounded(tensor.nbytes)
        return found

    def use(self, views: list[Tensor]) -> None:
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view


class Offload:
    """The offloaded layers of one model, its two blocks on the device, and the hooks that move layers.

    The hooks run in the scoring thread. A forward that failed leaves nothing behind: the next one begins with the first
    layer again.
    """

    def __init__(self, body: Any, layers: list[nn.Module], device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._layers = [_OffloadedLayer(layer, pinned=cuda) for layer in layers]
        most = max(layer.size for layer in self._layers)
        self._blocks = [torch.empty(most, dtype=torch.uint8, device=device) for _ in layers[:2]]
        # Made here: a view made in inference mode cannot be the data of a parameter.
        self._views = [layer.views_of(self._block(number)) for number, layer in enumerate(self._layers)]
        self._copies = torch.cuda.Stream(device) if cuda else None
        self._arrived = [torch.cuda.Event() for _ in self._layers] if cuda else []
        body.register_forward_pre_hook(lambda *_: self._copy(0))
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._begin(number))
            layer.register_forward_hook(lambda *_, number=number: self._end(number))

    def _block(self, number: int) -> Tensor:
        return self._blocks[number % len(self._blocks)]

    def _begin(self, number: int) -> None:
        if number + 1 < len(self._layers):
            self._copy(number + 1)
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived[number])
        self._layers[number].use(self._views[number])

    def _end(self, number: int) -> None:
        self._layers[number].use(self._layers[number].host_views)

    def _copy(self, number: int) -> None:
        layer = self._layers[number]
        block = self._block(number)[: layer.size]
        if self._copies is None:
            block.copy_(layer.host)
            return
        # What was queued so far may read this block; the layer that computes next reads the other.
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            block.copy_(layer.host, non_blocking=True)
            self._arrived[number].record()


def offloaded(frozen: FrozenModel, wanted: str, device: str) -> FrozenModel:
    """A model that was loaded on the host, changed in place: its last `wanted` layers (or all) stay there, the rest is moved to
    the device."""
    if is_vision(frozen.model):
        raise TeacherError(f"{frozen.path} reads pictures, and offload is for text models; leave it out")
    layers = getattr(frozen.body, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TeacherError(
            f"{frozen.path} keeps its layers where offloading them is not supported; leave offload out"
        )
    count = len(layers) if wanted == ALL else int(wanted)
    if count > len(layers):
        raise TeacherError(
            f"offload = {count}: {frozen.path} has {len(layers)} layers; lower it, or set 'all'"
        )
    kept, moved = list(layers[: len(layers) - count]), list(layers[len(layers) - count :])
    frozen.body.layers = nn.ModuleList(kept)
    frozen.model.to(device)
    frozen.body.layers = nn.ModuleList([*kept, *moved])
    if moved:
        Offload(frozen.body, moved, torch.device(device))
    return frozen.on(device)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
