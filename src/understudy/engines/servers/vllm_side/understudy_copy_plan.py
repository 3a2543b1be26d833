"""Records the copies of a model's weight loader once, and replays them without the loader.

The loader knows which slice of which fused matrix each Hugging Face tensor belongs to. It costs some thirty
microseconds of Python per tensor. On the device it only copies. So its copies are recorded the first time and
replayed: large ones with the driver's copy, small ones in groups, because a launch each would cost more
than the copy. Imports torch alone: vLLM's interpreter has no understudy.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LARGE_BYTES = 1 << 20


class CopyPlan:
    """Pairs of (target, source). None if the loader did more than copy: then `run` calls the loader."""

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
    """Records every `copy_` while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def record_copies(model: Any, tensors: list[tuple[str, torch.Tensor]]) -> CopyPlan:
    """Runs the loader over `tensors` and records its copies.

    The plan is used only if every copy reads the trainer's memory directly (not an intermediate tensor) and
    writes into a parameter, and if every parameter was written. Otherwise the loader runs every time.
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
    """Finds which of some tensors contains an address."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._extents = sorted(
            (one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in tensors
        )

    def __len__(self) -> int:
        return len(self._extents)

    def holder(self, tensor: torch.Tensor) -> int | None:
        place = bisect_right(self._extents, (tensor.data_ptr(), 1 << 63)) - 1
        return place if place >= 0 and tensor.data_ptr() < self._extents[place][1] else None
