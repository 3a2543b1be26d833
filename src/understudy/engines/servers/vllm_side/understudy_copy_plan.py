"""Watching a model's weight loader once, and doing what it did again without it.

A loader knows where each Hugging Face tensor belongs: which slice of which fused matrix. Running it costs some
thirty microseconds of Python per tensor. What it does on the device is only copies, so they are written down the first
time and repeated: large ones by the driver's own copy, small ones in groups, where a launch each would cost more than
they do. Imports torch alone: vLLM's interpreter has no understudy.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LARGE_BYTES = 1 << 20


class CopyPlan:
    """Pairs of (where to, where from), or nothing but the loader where that is not all it did."""

    def __init__(self, model: Any, tensors: list[tuple[str, torch.Tensor]], pairs: list[Any] | None) -> None:
        self._model, self._tensors, self._pairs = model, tensors, pairs

    @property
    def complete(self) -> bool:
        """Whether the copies are all the loader does."""
        return self._pairs is not None

    def run(self) -> None:
        with torch.no_grad():
            if self._pairs is None:
                self._model.load_weights(iter(self._tensors))
            else:
                small = [pair for pair in self._pairs if pair[0].nbytes < _LARGE_BYTES]
                for to, source in self._pairs:
                    if to.nbytes >= _LARGE_BYTES:
                        to.copy_(source)
                if small:
                    torch._foreach_copy_([to for to, _ in small], [source for _, source in small])


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def record_copies(model: Any, tensors: list[tuple[str, torch.Tensor]]) -> CopyPlan:
    """Runs the loader over `tensors` and writes down its copies.

    The plan is only trusted when every copy reads the trainer's memory itself (not something made from it on the way)
    and writes into a parameter, and when no parameter was left out; otherwise the loader runs every time.
    """
    watch = _Watch()
    with watch:
        model.load_weights(iter(tensors))
    given = _Memory(tensor for _, tensor in tensors)
    own = _Memory(model.parameters())
    sound = all(
        to.shape == source.shape and given.holder(source) is not None and own.holder(to) is not None
        for to, source in watch.copies
    )
    written = {own.holder(to) for to, _ in watch.copies}
    return CopyPlan(model, tensors, watch.copies if sound and len(written) == len(own) else None)


class _Memory:
    """Which of some tensors holds an address."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._extents = sorted(
            (one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in tensors
        )

    def __len__(self) -> int:
        return len(self._extents)

    def holder(self, tensor: torch.Tensor) -> int | None:
        place = bisect_right(self._extents, (tensor.data_ptr(), 1 << 63)) - 1
        return place if place >= 0 and tensor.data_ptr() < self._extents[place][1] else None
