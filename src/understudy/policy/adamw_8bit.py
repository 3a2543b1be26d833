"""AdamW whose two moments take one byte each.

Moments are cut into blocks of 256 numbers. A block keeps one float32 scale (its largest magnitude) and one byte a number:
an index into a book of 256 values that lie dense near 1 and reach down to 10⁻⁷ by decades, so that small and large
entries of one block both keep their leading digit. The second moment is stored as its square root, which halves its range,
and a value above 0 is never rounded to 0: a denominator that vanished would blow its weight's step up.

Masters stay float32; a parameter costs 2 bytes (and 1/32) of moments instead of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BLOCK = 256
_CHUNK = BLOCK * (1 << 14)
"""Numbers that are unpacked at a time: 4 M, so that the working memory of a step stays near 100 MB."""
_DECADES = 7


class AdamW8bit(torch.optim.Optimizer):
    """Steps as `torch.optim.AdamW` does, up to the rounding of its moments; works on any device, one tensor at a time."""

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
        state = self.state[weight]
        if not state:
            state.update(fresh_state(weight))
        state["step"] += 1
        count, (beta1, beta2) = float(state["step"]), group["betas"]
        rate = group["lr"] / (1 - beta1**count)
        root_correction = (1 - beta2**count) ** 0.5
        flat, grad = weight.view(-1), weight.grad.reshape(-1)  # type: ignore[union-attr]
        for start in range(0, flat.numel(), _CHUNK):
            part = slice(start, min(start + _CHUNK, flat.numel()))
            first = _unpack(state, "exp_avg", part, signed=True).lerp_(grad[part], 1 - beta1)
            second = _unpack(state, "exp_avg_root", part, signed=False).square_()
            root = second.mul_(beta2).addcmul_(grad[part], grad[part], value=1 - beta2).sqrt_()
            flat[part].mul_(1 - group["lr"] * group["weight_decay"])
            flat[part].addcdiv_(first, root.div(root_correction).add_(group["eps"]), value=-rate)
            _pack(state, "exp_avg", part, first, signed=True)
            _pack(state, "exp_avg_root", part, root, signed=False)


def fresh_state(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Moments of 0, by the names a checkpoint stores them under."""
    blocks = -(-weight.numel() // BLOCK)
    state = {"step": torch.zeros(())}
    for name, signed in (("exp_avg", True), ("exp_avg_root", False)):
        zero = int((_book(signed, torch.device("cpu")) == 0).nonzero()[0])
        state[f"{name}_codes"] = torch.full_like(weight, zero, dtype=torch.uint8)
        state[f"{name}_scales"] = torch.zeros(blocks, device=weight.device)
    return state


def _unpack(state: dict[str, torch.Tensor], name: str, part: slice, signed: bool) -> torch.Tensor:
    codes = state[f"{name}_codes"].view(-1)[part]
    scales = state[f"{name}_scales"][part.start // BLOCK : -(-part.stop // BLOCK)]
    values = _book(signed, codes.device)[codes.int()]
    return values * scales.repeat_interleave(BLOCK)[: len(values)]


def _pack(state: dict[str, torch.Tensor], name: str, part: slice, values: torch.Tensor, signed: bool) -> None:
    blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1)
    book = _book(signed, values.device)
    shares = values / scales.repeat_interleave(BLOCK)[: len(values)].clamp_min(1e-38)
    codes = torch.bucketize(shares, (book[1:] + book[:-1]) / 2)
    if not signed:
        codes = torch.where(values > 0, codes.clamp_min(1), codes)
    state[f"{name}_codes"].view(-1)[part] = codes.to(torch.uint8)
    state[f"{name}_scales"][blocks] = scales


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
