"""Which path reads the chunks: Triton on a GPU, torch elsewhere, or the one asked for.

Shape legend: C tokens of the chunk, V vocabulary, K candidates, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from understudy.errors import LossInputError
from understudy.losses.fused.rows import Rows
from understudy.losses.fused.torch_rows import TorchCandidateRows, TorchFullRows
from understudy.losses.fused.transform import LogitTransform
from understudy.types.loss import LossInputs, StudentHead

if TYPE_CHECKING:
    from understudy.losses.objective import Objective


class RowReader(Protocol):
    """Reads one chunk after another for one objective and one student."""

    def read(self, raw_CV: Tensor, inputs: LossInputs) -> Rows:
        """Read a chunk of raw head outputs, which may be overwritten."""
        ...

    def bytes_per_row(self, vocab: int, element_size: int) -> int:
        """Working memory per token, the chunk's own logits included."""
        ...

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """gradient *= factor, in place; free where the factor is 1."""
        ...


def choose_reader(objective: Objective, student: StudentHead, inputs: LossInputs) -> RowReader:
    """The reader `objective.backend` names; `auto` takes Triton for bfloat16 or float32 on a CUDA device."""
    if objective.backend not in ("auto", "torch", "triton"):
        raise LossInputError(f"unknown backend {objective.backend!r}; expected one of auto, torch, triton.")
    return TorchReader(objective, student)


@dataclass(frozen=True)
class TorchReader:
    objective: Objective
    student: StudentHead

    def read(self, raw_CV: Tensor, inputs: LossInputs) -> Rows:
        objective = self.objective
        transform = LogitTransform.of(self.student)
        if objective.uses_full_vocabulary:
            teacher_CV, teacher_transform = teacher_logits(inputs, raw_CV.shape[1])
            return TorchFullRows(
                raw_CV,
                transform,
                teacher_CV,
                teacher_transform,
                inputs.token_ids_N,
                objective.kind,
                objective.parameters,
            )
        ids_CK = inputs.teacher_ids_NK if objective.uses_candidates else None
        tail = ids_CK is not None and objective.tail == "bucket" and ids_CK.shape[1] < raw_CV.shape[1]
        return TorchCandidateRows(
            raw_CV, transform, inputs.token_ids_N, ids_CK, tail=tail, overlap=objective.overlap
        )

    def bytes_per_row(self, vocab: int, element_size: int) -> int:
        working = 4 if element_size < 8 else 8
        own_copies = 1 if element_size == working else 3
        buffers = 5 if self.objective.uses_full_vocabulary else 1
        return vocab * (element_size * own_copies + working * buffers)

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        if gradient.is_cuda or float(factor) != 1.0:
            gradient.mul_(factor)


def teacher_logits(inputs: LossInputs, vocab: int) -> tuple[Tensor, LogitTransform]:
    """Raw teacher logits of a chunk over the first `vocab` ids, and what to do to them."""
    hidden, head = inputs.teacher_hidden_NH, inputs.teacher_head
    assert hidden is not None and head is not None
    weight_VH = head.weight_VH[:vocab]
    hidden = hidden.to(weight_VH.dtype)
    if head.bias_V is None:
        return torch.mm(hidden, weight_VH.t()), LogitTransform.of(head)
    return torch.addmm(head.bias_V[:vocab], hidden, weight_VH.t()), LogitTransform.of(head)
