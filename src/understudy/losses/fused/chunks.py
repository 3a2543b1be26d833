"""The chunk loop: logits of a few thousand tokens at a time, gradients computed with them.

For each chunk of C tokens

    logits = hidden · weightᵀ                     one GEMM, [C × V] in a buffer that every chunk reuses
    read   a few numbers per token                (torch_rows, triton_rows)
    l      and its gradient in those numbers      (per_token, under autograd, [C × K])
    d      gradient of the logits                 in place of the logits
    ∂hidden = d · weight,  ∂weight += dᵀ · hidden two GEMMs

so the logits are computed once and never kept: three GEMMs in all, as many as an ordinary head costs. Both
gradients are ready when the forward pass ends; the backward pass multiplies them by the incoming scalar. A
chunk loop under plain autograd would keep every chunk alive until the backward pass and save nothing.

∂weight is accumulated across chunks in the weight's own dtype: each GEMM sums in float32 inside and rounds
once per chunk. A float32 accumulator would cost V·H·4 bytes (2.3 GiB for a 4096-wide head) and a pass over
it per chunk; with chunks of thousands of tokens the rounding stays well inside the dtype's own (measured in
benchmarks/losses/losses.py).

Shape legend: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from understudy.losses.fused.backends import RowReader, choose_reader
from understudy.losses.fused.rows import differentiate
from understudy.losses.per_token import token_losses
from understudy.losses.settings import ObjectiveSettings
from understudy.types.loss import LossInputs, StudentHead

CUDA_CHUNK_BYTES = 1800 << 20
CPU_CHUNK_BYTES = 96 << 20
"""Working memory of the chunk buffers. On a GPU larger chunks mean fewer read-modify-writes of ∂weight; 1.8
GiB keeps the whole path under 2 GiB. On a CPU small chunks stay closer to the cache."""

ROW_MULTIPLE = 128
"""Chunks are a multiple of the GEMM tile on a GPU."""
WAVE_ROWS = 4096
"""A chunk of this many rows makes ∂hidden a multiple of 128 output tiles (256 × 128 each, for widths of 1024
and up), which fills a GPU of 132 multiprocessors. With 2816 rows a third of them idles in that GEMM, with
5504 an eighth."""


def fused_token_losses(
    objective: ObjectiveSettings, student: StudentHead, inputs: LossInputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """(Σ weights·l, per-token columns) of the whole micro-batch."""
    job = _Job(objective, student, inputs, choose_reader(objective, student, inputs))
    tensors = (student.hidden_NH, student.weight_VH, student.bias_V)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        loss = _FusedLoss.apply(*tensors, job)
    else:
        loss = _run(job, Wanted(False, False, False)).loss
    return loss, job.columns


@dataclass
class _Job:
    """The inputs of one call; the run fills `columns`."""

    objective: ObjectiveSettings
    student: StudentHead
    inputs: LossInputs
    reader: RowReader
    columns: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """Which gradients to compute; a frozen head (adapters) skips a whole GEMM."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass
class _Result:
    loss: Tensor
    d_hidden_NH: Tensor | None = None
    d_weight_VH: Tensor | None = None
    d_bias_V: Tensor | None = None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, job: _Job) -> Tensor:
        wanted = Wanted(*ctx.needs_input_grad[:3])
        result = _run(job, wanted)
        ctx.gradients = (result.d_hidden_NH, result.d_weight_VH, result.d_bias_V)
        ctx.scale_ = job.reader.scale_
        return result.loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if ctx.gradients is None:
            raise RuntimeError(
                "a fused loss can be back-propagated once: its gradients were handed over, not kept"
            )
        d_hidden, d_weight, d_bias = ctx.gradients
        ctx.gradients = None
        for gradient in (d_hidden, d_weight, d_bias):
            if gradient is not None:
                ctx.scale_(gradient, grad_outputs[0])
        return d_hidden, d_weight, d_bias, None


def _run(job: _Job, wanted: Wanted) -> _Result:
    """The chunk loop on the student's own device, outside autograd and autocast: dtypes are the head's, as given."""
    hidden_NH = job.student.hidden_NH
    with (
        torch.no_grad(),
        torch.cuda.device_of(hidden_NH),
        torch.autocast(hidden_NH.device.type, enabled=False),
    ):
        return _run_chunks(job, wanted)


def _run_chunks(job: _Job, wanted: Wanted) -> _Result:
    hidden_NH, weight_VH = job.student.hidden_NH.detach(), job.student.weight_VH.detach()
    bias_V = job.student.bias_V
    count, vocab = hidden_NH.shape[0], weight_VH.shape[0]
    result = _Result(loss=torch.zeros((), dtype=_loss_dtype(hidden_NH.dtype), device=hidden_NH.device))
    result.d_hidden_NH = torch.empty_like(hidden_NH) if wanted.hidden else None
    result.d_weight_VH = torch.empty_like(weight_VH) if wanted.weight else None
    result.d_bias_V = torch.zeros_like(weight_VH[:, 0]) if wanted.bias else None
    rows = chunk_rows(job, count, vocab)
    logits_CV = torch.empty(min(rows, count), vocab, dtype=hidden_NH.dtype, device=hidden_NH.device)
    columns: list[dict[str, Tensor]] = []
    for start in range(0, count, max(rows, 1)):
        part = slice(start, min(start + rows, count))
        raw_CV = project(hidden_NH[part], weight_VH, bias_V, logits_CV[: part.stop - part.start])
        if job.student.usable is not None:
            job.student.usable.hide_(raw_CV)
        columns += _one_chunk(job, wanted, result, part, raw_CV, weight_VH)
    if count == 0:
        columns.append(_empty_columns(job, hidden_NH))
        if result.d_weight_VH is not None:
            result.d_weight_VH.zero_()
    job.columns.update(_join(columns))
    return result


def _one_chunk(
    job: _Job, wanted: Wanted, result: _Result, part: slice, raw_CV: Tensor, weight_VH: Tensor
) -> list[dict[str, Tensor]]:
    columns: list[dict[str, Tensor]] = []
    d_CV, scale_C = raw_CV, None
    step = -(-len(raw_CV) // job.reader.readings)
    for at in range(0, len(raw_CV), step):
        own = slice(part.start + at, min(part.start + at + step, part.stop))
        found, own_d_CV, scale_C = _read(job, wanted, result, own, raw_CV[at : at + step])
        d_CV = own_d_CV if job.reader.readings == 1 else raw_CV
        columns.append(found)
    if wanted.any:
        _add_products(job, result, part, d_CV, scale_C, weight_VH)
    return columns


def _read(
    job: _Job, wanted: Wanted, result: _Result, part: slice, raw_CV: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """(columns, d_CV, scale_C) of some rows: their loss is added, the gradient of their logits is scale_C · d_CV."""
    inputs = job.inputs.rows(part.start, part.stop)
    rows = job.reader.read(raw_CV, inputs, wanted.any)
    if not wanted.any:
        losses_C, columns = token_losses(job.objective, rows.view, inputs)
        result.loss += (inputs.weights_N * losses_C).sum()
        return columns, raw_CV, None
    total, columns, grads = differentiate(job.objective, rows.view, inputs)
    result.loss += total
    return columns, *rows.gradient(grads)


def _add_products(
    job: _Job, result: _Result, part: slice, d_CV: Tensor, scale_C: Tensor | None, weight_VH: Tensor
) -> None:
    """Gradients of hidden states, weight and bias from that of a chunk's logits, scale_C · d_CV."""
    hidden_CH = job.student.hidden_NH.detach()[part]
    if result.d_hidden_NH is not None:
        d_hidden_CH = torch.mm(d_CV, weight_VH, out=result.d_hidden_NH[part])
        if scale_C is not None:
            job.reader.scaled_rows(d_hidden_CH, scale_C, d_hidden_CH)
    if result.d_weight_VH is not None:
        scaled_CH = hidden_CH
        if scale_C is not None:
            scaled_CH = job.reader.scaled_rows(hidden_CH, scale_C, hidden_CH.new_empty(hidden_CH.shape))
        if part.start == 0:
            torch.mm(d_CV.t(), scaled_CH, out=result.d_weight_VH)
        else:
            result.d_weight_VH.addmm_(d_CV.t(), scaled_CH)
    if result.d_bias_V is not None:
        scale = torch.ones_like(hidden_CH[:, 0]) if scale_C is None else scale_C.to(d_CV.dtype)
        result.d_bias_V += d_CV.t() @ scale


def project(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, out_CV: Tensor) -> Tensor:
    """Raw head outputs of a chunk, written into the shared buffer."""
    if bias_V is None:
        return torch.mm(hidden_CH, weight_VH.t(), out=out_CV)
    return torch.addmm(bias_V.detach(), hidden_CH, weight_VH.t(), out=out_CV)


def chunk_rows(job: _Job, count: int, vocab: int) -> int:
    """Tokens per chunk: as many as the budget allows, in chunks of nearly equal size."""
    on_gpu = job.student.hidden_NH.is_cuda
    budget = job.objective.chunk_bytes or (CUDA_CHUNK_BYTES if on_gpu else CPU_CHUNK_BYTES)
    most = max(1, budget // job.reader.bytes_per_row(vocab, job.student.hidden_NH.element_size()))
    chunks = max(1, -(-count // most))
    if on_gpu and chunks > 1 and most >= WAVE_ROWS:
        return most // WAVE_ROWS * WAVE_ROWS
    rows = -(-count // chunks)
    if on_gpu and most >= ROW_MULTIPLE:
        rows = min(-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, most // ROW_MULTIPLE * ROW_MULTIPLE)
    return rows


def _join(chunks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Columns of all chunks concatenated, moved as one matrix per chunk: a dozen small copies would take
    measurable time on a GPU."""
    names = list(chunks[0])
    matrix = torch.cat([torch.stack([chunk[name] for name in names]) for chunk in chunks], dim=1)
    return dict(zip(names, matrix.unbind(0), strict=True))


def _empty_columns(job: _Job, hidden_NH: Tensor) -> dict[str, Tensor]:
    nothing = torch.zeros(0, dtype=_loss_dtype(hidden_NH.dtype), device=hidden_NH.device)
    return {"loss": nothing, "logp": nothing}


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
