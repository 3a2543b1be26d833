"""The transform from raw head outputs to logits (scale, soft cap, temperature), and its derivative.

    z = cap(scale · x) / temperature,   cap(y) = softcap · tanh(y / softcap)
    ∂z/∂x = scale / temperature · (1 − (z · temperature / softcap)²)

Shape legend: … any shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.types.loss import StudentHead, TeacherHead


@dataclass(frozen=True)
class LogitTransform:
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @staticmethod
    def of(head: StudentHead | TeacherHead) -> LogitTransform:
        return LogitTransform(head.logit_scale, head.softcap, head.temperature)

    def apply_(self, x: Tensor) -> Tensor:
        """z, written over x."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return x if factor == 1.0 else x.mul_(factor)
        return x.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slope(self, z: Tensor) -> Tensor | float:
        """∂z/∂x as a function of z; a number where it is constant."""
        constant = self.scale / self.temperature
        if self.softcap is None:
            return constant
        inner = z * (self.temperature / self.softcap)
        return torch.addcmul(torch.full_like(z, constant), inner, inner, value=-constant)
