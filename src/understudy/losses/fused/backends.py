"""Chooses the path that reads the chunks: Triton on a GPU, torch otherwise, or the recipe's choice.

Shape legend: C tokens of the chunk, V vocabulary, K candidates, H hidden size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from understudy.errors import LossInputError
from understudy.losses.fused.rows import Rows
from understudy.losses.fused.torch_rows import TorchCandidateRows, TorchFullRows
from understudy.losses.fused.transform import LogitTransform
from understudy.losses.settings import ObjectiveSettings
from understudy.types.loss import LossInputs, StudentHead
from understudy.types.usable_ids import UsableIds

try:
    from understudy.losses.fused import triton_rows
except ModuleNotFoundError as missing:  # triton comes with CUDA builds of torch only
    if missing.name is None or not missing.name.startswith("triton"):
        raise
    triton_rows = None  # type: ignore[assignment]

TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Read once, as Triton does: kernels are interpreted (on any device) or compiled when they are defined."""


class RowReader(Protocol):
    """Reads one chunk after another for one objective and one student."""

    def read(self, raw_CV: Tensor, inputs: LossInputs, with_gradient: bool) -> Rows:
        """Reads a chunk of raw head outputs, which may be overwritten."""
        ...

    def bytes_per_row(self, vocab: int, element_size: int) -> int:
        """Working memory per token, the chunk's own logits included."""
        ...

    @property
    def readings(self) -> int:
        """Number of parts a chunk is read in. Above 1 the gradient is written over the chunk, unscaled."""
        ...

    def scaled_rows(self, x_CH: Tensor, scale_C: Tensor, out_CH: Tensor) -> Tensor:
        """scale_C · x_CH into `out_CH`, which may be x_CH."""
        ...

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """gradient *= factor, in place; no cost if the factor is 1."""
        ...


def choose_reader(objective: ObjectiveSettings, student: StudentHead, inputs: LossInputs) -> RowReader:
    """The reader `objective.backend` names; `auto` takes Triton where it can run."""
    if objective.backend == "torch":
        return TorchReader(objective, student)
    if objective.backend == "auto":
        usable = student.hidden_NH.is_cuda and why_not_triton(objective, student, inputs) is None
        return TritonReader(objective, student) if usable else TorchReader(objective, student)
    if objective.backend != "triton":
        raise LossInputError(f"unknown backend {objective.backend!r}; expected one of auto, torch, triton.")
    reason = why_not_triton(objective, student, inputs)
    if reason is not None:
        raise LossInputError(
            f"backend = 'triton' cannot run here: {reason}. Use backend = 'torch' or 'auto'."
        )
    return TritonReader(objective, student)


def why_not_triton(objective: ObjectiveSettings, student: StudentHead, inputs: LossInputs) -> str | None:
    """Why the Triton path cannot take this call, or None."""
    if triton_rows is None:
        return "the triton package is not installed"
    if not student.hidden_NH.is_cuda and not TRITON_INTERPRETED:
        return f"the student is on {student.hidden_NH.device}, and Triton compiles for CUDA devices (or TRITON_INTERPRET=1)"
    dtypes = {student.hidden_NH.dtype}
    if objective.uses_full_vocabulary and inputs.teacher_head is not None:
        dtypes.add(inputs.teacher_head.weight_VH.dtype)
    if not dtypes <= {torch.bfloat16, torch.float32}:
        return f"the kernels take bfloat16 and float32, got {sorted(str(dtype) for dtype in dtypes)}"
    return None


@dataclass(frozen=True)
class TorchReader:
    objective: ObjectiveSettings
    student: StudentHead

    def read(self, raw_CV: Tensor, inputs: LossInputs, with_gradient: bool) -> Rows:
        objective = self.objective
        transform = LogitTransform.of(self.student)
        if objective.uses_full_vocabulary:
            teacher_CV, teacher_transform = teacher_logits(inputs, raw_CV.shape[1], self.student.usable)
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
        return TorchCandidateRows(raw_CV, transform, inputs.token_ids_N, ids_CK, tail=tail)

    def bytes_per_row(self, vocab: int, element_size: int) -> int:
        working = 4 if element_size < 8 else 8
        own_copies = 1 if element_size == working else 3
        buffers = 5 if self.objective.uses_full_vocabulary else 1
        return vocab * (element_size * own_copies + working * buffers)

    @property
    def readings(self) -> int:
        return 1

    def scaled_rows(self, x_CH: Tensor, scale_C: Tensor, out_CH: Tensor) -> Tensor:
        return out_CH.copy_(x_CH * scale_C.unsqueeze(-1))

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        if gradient.is_cuda or float(factor) != 1.0:
            gradient.mul_(factor)


@dataclass(frozen=True)
class TritonReader:
    objective: ObjectiveSettings
    student: StudentHead

    def read(self, raw_CV: Tensor, inputs: LossInputs, with_gradient: bool) -> Rows:
        objective = self.objective
        transform = LogitTransform.of(self.student)
        if objective.uses_full_vocabulary:
            teacher_CV, teacher_transform = teacher_logits(inputs, raw_CV.shape[1], self.student.usable)
            return triton_rows.TritonFullRows(
                raw_CV,
                transform,
                teacher_CV,
                teacher_transform,
                inputs.token_ids_N,
                objective.kind,
                objective.parameters,
            )
        candidates = objective.uses_candidates
        return triton_rows.TritonCandidateRows(
            raw_CV,
            transform,
            inputs.token_ids_N,
            inputs.teacher_ids_NK if candidates else None,
            inputs.teacher_logprobs_NK if candidates else None,
            objective.kind,
            objective.parameters,
            objective.tail,
            objective.log_prob_min_clamp,
            with_gradient=with_gradient,
        )

    def bytes_per_row(self, vocab: int, element_size: int) -> int:
        own = vocab * element_size
        return own + own // self.readings if self.objective.uses_full_vocabulary else own

    @property
    def readings(self) -> int:
        """A teacher's logits are computed for half a chunk at a time. The student's logits can then use a
        chunk large enough to fill the device in the GEMM for ∂hidden, whose output is small."""
        return 2 if self.objective.uses_full_vocabulary else 1

    def scaled_rows(self, x_CH: Tensor, scale_C: Tensor, out_CH: Tensor) -> Tensor:
        return triton_rows.scaled_rows(x_CH, scale_C, out_CH)

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        triton_rows.scale_unless_one_(gradient, factor)


def teacher_logits(inputs: LossInputs, vocab: int, usable: UsableIds | None) -> tuple[Tensor, LogitTransform]:
    """Raw teacher logits of a chunk over the first `vocab` ids, unusable ones hidden, and the transform to
    apply to them."""
    hidden, head = inputs.teacher_hidden_NH, inputs.teacher_head
    assert hidden is not None and head is not None
    weight_VH = head.weight_VH[:vocab]
    hidden = hidden.to(weight_VH.dtype)
    if head.bias_V is None:
        raw_CV = torch.mm(hidden, weight_VH.t())
    else:
        raw_CV = torch.addmm(head.bias_V[:vocab], hidden, weight_VH.t())
    return raw_CV if usable is None else usable.hide_(raw_CV), LogitTransform.of(head)
