"""Low-rank adapters for engine processes: only the small matrices are sent; the engine merges them.

    trainer ──A, B, scale of each adapted layer, hash of the base──> engine: W = W0 + scale · B·A, W0 kept

Adapters are sent as named tensors, like whole weights (`snapshots.py`, `broadcast.py`). The base is never
sent: an engine process loads it from the same folder as the trainer. The mark is a hash of the base. If
trainer and engine differ in it, the engine refuses the adapters. Every version is merged from the kept
base, so rounding errors do not accumulate over publishes. An engine that takes adapters holds the adapted
layers twice. So it has the whole base at any time, and may score with it (`AdaptedModel.keep_base`).

Legend: O outputs, I inputs of a layer, R rank of its adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn

from understudy.errors import EngineError

_MARK = "adapter:base"
_DOWN, _UP, _SCALE = "adapter:down:", "adapter:up:", "adapter:scale:"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type with an element's number of bytes."""


def packed_adapter(name: str, down_RI: Tensor, up_OR: Tensor, scale: float) -> list[tuple[str, Tensor]]:
    """The adapter of the weight `name`, as tensors to publish."""
    return [
        (f"{_DOWN}{name}", down_RI),
        (f"{_UP}{name}", up_OR),
        (f"{_SCALE}{name}", torch.tensor([scale], dtype=torch.float64)),
    ]


def packed_mark(mark: bytes) -> tuple[str, Tensor]:
    return _MARK, torch.tensor(list(mark), dtype=torch.uint8)


def is_of_adapters(name: str) -> bool:
    """Whether a received tensor belongs to a set of adapters; a set never contains whole weights too."""
    return name.startswith("adapter:")


@torch.no_grad()
def base_mark(weights: Iterable[tuple[str, Tensor]]) -> bytes:
    """A hash of weights: names, shapes, types, and integer sums over all bits, exact on any device."""
    lines = []
    for name, tensor in weights:
        words = tensor.detach().contiguous().view(_WORDS[tensor.element_size()])
        rows = words.flatten(1).sum(dim=1, dtype=torch.int64) if words.dim() > 1 else words.reshape(-1).long()
        places = torch.arange(1, len(rows) + 1, device=rows.device)  # so that swapped rows change the sum
        lines.append(f"{name} {tensor.dtype} {list(tensor.shape)} {int((rows * places).sum())}")
    return blake2b("\n".join(sorted(lines)).encode(), digest_size=16).digest()


class AdaptedModel:
    """An engine's model that takes adapters: keeps the base of the adapted layers. Calls must not overlap."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mark: bytes | None = None
        self._base: dict[str, Tensor] = {}
        """The adapted layers' weights without an adapter."""
        self._base_in_use = False
        """Other modules compute with the base, so it may not change."""

    def keep_base(self, modules: nn.Module, adapted: Collection[str]) -> None:
        """Puts the base into `modules`, a copy of the model's modules that shares its parameters.

        Called once, before any weights arrive. The layers in `adapted`, which will get adapters, are copied; the
        other tensors are the model's own. From then on other adapters and whole weights are refused.
        """
        base: dict[int, nn.Parameter] = {}
        for name, parameter in self._model.named_parameters():
            kept = parameter.detach()
            if name in adapted:
                kept = self._base[name] = kept.clone()
            base[id(parameter)] = nn.Parameter(kept, requires_grad=False)
        for module in modules.modules():
            for name, own in list(module.named_parameters(recurse=False)):
                setattr(module, name, base[id(own)])
        self._base_in_use = True

    def weights(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields every weight of the model by name; adapted ones are merged, the rest are the model's own
        tensors.

        Adapters that do not fit are refused before the first tensor is yielded.
        """
        named = dict(tensors)
        adapted = [name.removeprefix(_DOWN) for name in named if name.startswith(_DOWN)]
        own = dict(self._model.named_parameters())
        self._check(named, adapted, own)
        return self._merged(named, frozenset(adapted), own)

    def _check(self, named: dict[str, Tensor], adapted: Sequence[str], own: dict[str, nn.Parameter]) -> None:
        if self._mark is None:
            self._mark = base_mark(own.items())
        if self._mark != bytes(named[_MARK].tolist()):
            raise EngineError(
                "the adapters that came belong to other weights than this engine has loaded: student.model changed since the trainer "
                "read it, or means another revision here; set student.lora.publish = 'merged', or pin student.revision"
            )
        for name in adapted:
            down_RI, up_OR = named[f"{_DOWN}{name}"], named[f"{_UP}{name}"]
            if name not in own or own[name].shape != (up_OR.shape[0], down_RI.shape[1]):
                found = list(own[name].shape) if name in own else "none"
                raise EngineError(
                    f"an adapter of {list(up_OR.shape)} × {list(down_RI.shape)} came for {name}; this model has {found}"
                )
            if self._base_in_use and name not in self._base:
                raise EngineError(
                    f"an adapter came for {name}, which a teacher in this process shares with the engine; set "
                    "teachers.NAME.placement = 'standalone'"
                )

    @torch.no_grad()
    def _merged(
        self, named: dict[str, Tensor], adapted: frozenset[str], own: dict[str, nn.Parameter]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in own.items():
            if name not in adapted and name not in self._base:
                yield name, parameter
                continue
            if name not in self._base:
                self._base[name] = parameter.detach().clone()
            base_OI = self._base[name]
            if name not in adapted:  # an earlier version had an adapter here
                yield name, base_OI
                continue
            down_RI = named[f"{_DOWN}{name}"].to(base_OI.device, torch.float32)
            up_OR = named[f"{_UP}{name}"].to(base_OI.device, torch.float32)
            yield name, merged(base_OI, down_RI, up_OR, float(named[f"{_SCALE}{name}"]))

    def replaced(self) -> None:
        """After whole weights arrived: they are the base of the next adapters."""
        if self._base_in_use:
            raise EngineError(
                "whole weights came, and the base of this engine is a teacher (placement = 'engine'); set student.lora.publish = "
                "'adapter'"
            )
        self._mark, self._base = None, {}


def merged(base_OI: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float) -> Tensor:
    """Adds an adapter to a layer in float32 and rounds once: at most half a unit in the last place off."""
    return (base_OI.float() + scale * (up_OR.float() @ down_RI.float())).to(base_OI.dtype)
