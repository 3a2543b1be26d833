"""AdamW whose two moments take one byte each.

Moments are cut into blocks of 256 numbers. A block keeps one float32 scale (its largest magnitude) and one
byte a number: an index into a table of 256 values. The table is dense near 1 and reaches down to 10⁻⁷ by
decades, so small and large entries of one block both keep their leading digit. The second moment is stored
as its square root, which halves its range. A value above 0 is never rounded to 0, because a zero denominator
would make the weight's step explode.

Masters stay float32; a parameter costs 2 bytes (and 1/32) of moments instead of 8.

Blocks are those of the whole flattened tensor, however many ranks hold it. A rank steps its own piece; if
the border of a piece cuts a block, the ranks agree on that block's scale. So codes and scales do not depend
on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from understudy.errors import PolicyError

BLOCK = 256
_CHUNK = BLOCK * (1 << 14)
"""Numbers unpacked at a time: 4 M, so that the working memory of a step stays near 100 MB."""
_DECADES = 7


class AdamW8bit(torch.optim.Optimizer):
    """Steps as `torch.optim.AdamW` does, up to the rounding of its moments; works on any device, one tensor
    at a time."""

    def __init__(
        self, params: Any, lr: float = 0.0, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, group)

    def _step_one(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        state, piece = self.state[weight], piece_of(weight)
        if not state:
            state.update(fresh_state(weight))
        state["step"] += 1
        count, (beta1, beta2) = float(state["step"]), group["betas"]
        rate = group["lr"] / (1 - beta1**count)
        root_correction = (1 - beta2**count) ** 0.5
        assert weight.grad is not None
        flat, grad = local(weight).view(-1), local(weight.grad).reshape(-1)

        def moments(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
            first = _unpack(state, "exp_avg", piece, part, signed=True).lerp_(grad[part], 1 - beta1)
            second = _unpack(state, "exp_avg_root", piece, part, signed=False).square_()
            return first, second.mul_(beta2).addcmul_(grad[part], grad[part], value=1 - beta2).sqrt_()

        agreed = _agreed_scales(piece, moments, flat) if piece.cut_blocks else None
        for part in piece.chunks():
            first, root = moments(part)
            flat[part].mul_(1 - group["lr"] * group["weight_decay"])
            flat[part].addcdiv_(first, root.div(root_correction).add_(group["eps"]), value=-rate)
            _pack(state, "exp_avg", piece, part, first, None if agreed is None else agreed[0], signed=True)
            _pack(
                state, "exp_avg_root", piece, part, root, None if agreed is None else agreed[1], signed=False
            )


@dataclass(frozen=True, slots=True)
class HeldRange:
    """Which numbers of a whole, flattened tensor this rank holds."""

    start: int
    stop: int
    total: int
    cut_blocks: tuple[int, ...] = ()
    """Blocks of the whole tensor that lie on more than one rank, the same on every rank."""
    group: dist.ProcessGroup | None = None

    @property
    def blocks(self) -> slice:
        """The blocks that this rank has numbers of."""
        return _blocks(self.start, self.stop)

    def chunks(self) -> Iterator[slice]:
        """The piece's own numbers, counted from 0, in parts that end where blocks do."""
        place, length = 0, self.stop - self.start
        while place < length:
            end = min(place + _CHUNK - (self.start + place) % BLOCK, length)
            yield slice(place, end)
            place = end


def piece_of(weight: torch.Tensor) -> HeldRange:
    total = weight.numel()
    if not isinstance(weight, DTensor):
        return HeldRange(0, total, total)
    mesh = weight.device_mesh
    if mesh.ndim != 1 or tuple(weight.placements) != (Shard(0),):
        raise PolicyError(f"adamw_8bit steps weights that are cut by rows, not {weight.placements}")
    rows, size = weight.shape[0], mesh.size()
    edges = [min(rank * -(-rows // size), rows) * (total // rows) for rank in range(size + 1)]
    cuts = dict.fromkeys(edge // BLOCK for edge in edges[1:-1] if edge % BLOCK and edge < total)
    rank = mesh.get_local_rank()
    return HeldRange(edges[rank], edges[rank + 1], total, tuple(cuts), mesh.get_group())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fresh_state(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Zero moments, by the names a checkpoint stores them under; with several ranks, of this rank's piece."""
    blocks = piece_of(weight).blocks
    state = {"step": torch.zeros(())}
    for name, signed in (("exp_avg", True), ("exp_avg_root", False)):
        zero = int((_book(signed, torch.device("cpu")) == 0).nonzero()[0])
        state[f"{name}_codes"] = torch.full_like(weight, zero, dtype=torch.uint8)
        state[f"{name}_scales"] = torch.zeros(blocks.stop - blocks.start, device=weight.device)
    return state


def whole_scales(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The scales of all blocks, gathered from the ranks. Collective: every rank must call it."""
    piece = piece_of(weight)
    if piece.group is None:
        return scales
    found = torch.zeros(-(-piece.total // BLOCK), device=scales.device)
    found[piece.blocks] = scales
    dist.all_reduce(found, dist.ReduceOp.MAX, group=piece.group)
    return found


def own_scales(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of the scales of all blocks."""
    return scales[piece_of(weight).blocks]


def _blocks(start: int, stop: int) -> slice:
    first = start // BLOCK
    return slice(first, max(first, -(-stop // BLOCK)) if stop > start else first)


def _agreed_scales(
    piece: HeldRange, moments: Callable[[slice], tuple[torch.Tensor, torch.Tensor]], flat: torch.Tensor
) -> list[dict[int, torch.Tensor]]:
    """The new scales of cut blocks, of the first and of the second moment: their largest magnitude over all
    ranks."""
    found = torch.zeros(2, len(piece.cut_blocks), device=flat.device)
    for place, block in enumerate(piece.cut_blocks):
        start, stop = max(block * BLOCK, piece.start), min((block + 1) * BLOCK, piece.stop)
        if start < stop:
            for row, values in enumerate(moments(slice(start - piece.start, stop - piece.start))):
                found[row, place] = values.abs().amax()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=piece.group)
    return [dict(zip(piece.cut_blocks, row, strict=True)) for row in found]


def _unpack(
    state: dict[str, torch.Tensor], name: str, piece: HeldRange, part: slice, signed: bool
) -> torch.Tensor:
    codes = local(state[f"{name}_codes"]).view(-1)[part]
    values = _book(signed, codes.device)[codes.int()]
    return values * _spread(state[f"{name}_scales"][_own(piece, part)], piece, part)


def _pack(
    state: dict[str, torch.Tensor],
    name: str,
    piece: HeldRange,
    part: slice,
    values: torch.Tensor,
    agreed: Mapping[int, torch.Tensor] | None,
    signed: bool,
) -> None:
    lead = (piece.start + part.start) % BLOCK
    padded = torch.nn.functional.pad(values, (lead, -(lead + len(values)) % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1)
    first = (piece.start + part.start) // BLOCK
    for block, scale in (agreed or {}).items():
        if first <= block < first + len(scales):
            scales[block - first] = scale
    book = _book(signed, values.device)
    shares = values / _spread(scales, piece, part).clamp_min(1e-38)
    codes = torch.bucketize(shares, (book[1:] + book[:-1]) / 2)
    if not signed:
        codes = torch.where(values > 0, codes.clamp_min(1), codes)
    local(state[f"{name}_codes"]).view(-1)[part] = codes.to(torch.uint8)
    state[f"{name}_scales"][_own(piece, part)] = scales


def _own(piece: HeldRange, part: slice) -> slice:
    """The blocks of a part, counted from the piece's first."""
    blocks = _blocks(piece.start + part.start, piece.start + part.stop)
    return slice(blocks.start - piece.blocks.start, blocks.stop - piece.blocks.start)


def _spread(scales: torch.Tensor, piece: HeldRange, part: slice) -> torch.Tensor:
    """One scale for each number of a part."""
    lead = (piece.start + part.start) % BLOCK
    return scales.repeat_interleave(BLOCK)[lead : lead + part.stop - part.start]


@cache
def _book(signed: bool, device: torch.device) -> torch.Tensor:
    """256 sorted values in [−1, 1] or [0, 1]: each decade below 1 has half as many steps as the one above it."""
    finest = 6 if signed else 7
    magnitudes = [1.0]
    for decade in range(_DECADES):
        steps = 2 ** (finest - decade)
        edges = torch.linspace(0.1, 1.0, steps + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2
        magnitudes += (middles * 10.0**-decade).tolist()
    values = [0.0, *magnitudes, *(-value for value in magnitudes if signed and value != 1.0)]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)
