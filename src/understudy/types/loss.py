"""The inputs and outputs of a loss.

Shape legend: N loss-bearing tokens of a micro-batch (flat, no padding), K candidate ids per token, H hidden
size, V vocabulary. A loss never sees sequences, padding, ranks or config: everything the reduction needs is
folded into `weights_N` for the whole step beforehand (see `understudy.losses.reduce`), so a loss is always

    loss = Σ_N weights_N · l_N

and therefore the same number however the tokens are split into micro-batches, packed, ordered or sharded.

Example: three tokens of one response, scored by a teacher that sent its two best candidates.

    LossInputs(
        token_ids_N=tensor([5, 9, 2]),
        weights_N=tensor([1 / 3, 1 / 3, 1 / 3]),
        positions_N=tensor([0, 1, 2]),
        teacher_ids_NK=tensor([[5, 7], [9, 1], [2, 0]]),
        teacher_logprobs_NK=tensor([[-0.1, -2.5], [-0.4, -1.2], [-0.01, -5.0]]),
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from understudy.errors import LossInputError
from understudy.types.loss_metrics import (
    Metric,
    MetricMax,
    MetricMin,
    MetricSum,
    MetricTotal,
    merge_metrics,
    metric_results,
    metrics_to_host,
)
from understudy.types.scores import NO_CANDIDATE
from understudy.types.usable_ids import UsableIds

__all__ = [
    "LossInputs",
    "LossOutput",
    "Metric",
    "MetricMax",
    "MetricMin",
    "MetricSum",
    "MetricTotal",
    "StudentHead",
    "StudentLogits",
    "TeacherHead",
    "merge_metrics",
    "metric_results",
    "metrics_to_host",
]

_TensorMap = Callable[[Tensor], Tensor]

_LONG_N = ("positions_N", "sequence_ids_N")
_FLOAT_N = (
    "weights_N",
    "teacher_logprobs_N",
    "behaviour_logprobs_N",
    "old_logprobs_N",
    "advantages_N",
    "distill_advantages_N",
    "importance_N",
    "reference_logprobs_N",
    "old_values_N",
    "returns_N",
)

MASS_SLACK = 1e-2
"""How far a row of teacher probabilities may sum above 1: bfloat16 logprobs have errors up to 0.4 % each."""


@dataclass(frozen=True)
class StudentHead:
    """The student just before its vocabulary projection: what the fused losses consume.

    logits = temperature⁻¹ · cap(logit_scale · (hidden · weightᵀ + bias)), with cap(x) = softcap · tanh(x / softcap).
    """

    hidden_NH: Tensor
    """Final hidden states (after the last norm) of the positions that predict each of the N tokens."""
    weight_VH: Tensor
    """Head matrix, in the dtype of `hidden_NH`; it may be tied to the embedding."""
    bias_V: Tensor | None = None
    """Head bias, where the model has one."""
    softcap: float | None = None
    """Final logit soft-capping (Gemma style), applied after `logit_scale`."""
    logit_scale: float = 1.0
    """Constant that the model multiplies its logits by (Cohere, Granite)."""
    temperature: float = 1.0
    """Temperature of the student in the loss; independent of the rollout's."""
    usable: UsableIds | None = None
    """Ids that the softmax runs over; None: every row of the head. Not with a soft cap: there the weight
    itself is cut."""

    def __post_init__(self) -> None:
        _check_head("student", self.hidden_NH, self.weight_VH, self.bias_V, self.softcap, self.temperature)

    @property
    def vocab_size(self) -> int:
        return self.weight_VH.shape[0]


@dataclass(frozen=True)
class StudentLogits:
    """Whole logits: the reference form, for tests and small models; needs several times N·V memory."""

    logits_NV: Tensor
    """Raw logits (after softcap and scale, before temperature)."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.logits_NV.ndim != 2 or not self.logits_NV.is_floating_point():
            raise LossInputError(
                f"logits_NV must be a float tensor [N, V]; got {describe_tensor(self.logits_NV)}."
            )
        _check_positive("student temperature", self.temperature)

    @property
    def vocab_size(self) -> int:
        return self.logits_NV.shape[1]


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's vocabulary projection, sent once per teacher; its hidden states come per token."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    """Teacher temperature; other than 1 only for a teacher that sends hidden states."""

    def __post_init__(self) -> None:
        _check_head("teacher", None, self.weight_VH, self.bias_V, self.softcap, self.temperature)


@dataclass(frozen=True)
class LossInputs:
    """Everything about N tokens except the student's own forward pass. Build it on the CPU, then call
    `.to(device)`: values are checked once, at construction, where reading them needs no device
    synchronisation."""

    token_ids_N: Tensor
    """int64: the token the student wrote at each loss-bearing position."""
    weights_N: Tensor
    """float32: reduction weights over the global batch; 0 gives a token no loss."""
    positions_N: Tensor | None = None
    """int64: index of the token within its response, for diagnostics by position."""
    sequence_ids_N: Tensor | None = None
    """int64: which sequence a token belongs to; needed only for a discounted advantage."""
    teacher_logprobs_N: Tensor | None = None
    """float32: log p_T of the written token (every signal carries it). Above 0 is possible in a chain of tokens
    (`teacher/alignment.py`); replies of teachers are checked where they arrive."""
    teacher_ids_NK: Tensor | None = None
    """int64: candidate ids, unique per token (`topk`: the teacher's best; `at_ids`: the student's choice)."""
    teacher_logprobs_NK: Tensor | None = None
    """float32: full-softmax teacher logprobs at `teacher_ids_NK`; `NO_CANDIDATE`: there is no candidate."""
    teacher_hidden_NH: Tensor | None = None
    """Teacher's final hidden states (`hidden`); its H may differ from the student's."""
    teacher_head: TeacherHead | None = None
    """The head that goes with `teacher_hidden_NH`."""
    behaviour_logprobs_N: Tensor | None = None
    """float32: log-probability under the policy that sampled the token, as the engine reported it."""
    old_logprobs_N: Tensor | None = None
    """float32: the trainer's own logprob of the token at the start of the step (proximal anchor)."""
    advantages_N: Tensor | None = None
    """float32: task advantage of the token, normalised before the distillation term is added."""
    distill_advantages_N: Tensor | None = None
    """float32: per-token distillation advantage computed beforehand; replaces −k1 where present."""
    importance_N: Tensor | None = None
    """float32, ≥ 0: factor of the policy losses (old policy over behaviour, truncated); 0 drops the token."""
    reference_logprobs_N: Tensor | None = None
    """float32: log-probability under the frozen reference."""
    old_values_N: Tensor | None = None
    """float32: the critic's value of the token before the step."""
    returns_N: Tensor | None = None
    """float32: the critic's target."""
    given_N: Tensor | None = None
    """bool: True at tokens of given answers, which the student did not draw. Terms that assume a drawn token are 0
    there, and `behaviour_logprobs_N` is not read. None: the student drew all tokens."""

    def __post_init__(self) -> None:
        self._check_shapes()
        object.__setattr__(self, "_max_id", self._check_values())
        logprobs = self.teacher_logprobs_NK
        has_gaps = logprobs is not None and bool((logprobs <= NO_CANDIDATE / 2).any())
        object.__setattr__(self, "_has_gaps", has_gaps)

    @property
    def num_tokens(self) -> int:
        return self.token_ids_N.shape[0]

    @property
    def max_id(self) -> int:
        """Largest token id anywhere in the record (−1 if there is none), computed at construction without
        reading the device."""
        return int(getattr(self, "_max_id"))  # noqa: B009 - set in __post_init__ of a frozen dataclass

    @property
    def no_candidate_NK(self) -> Tensor | None:
        """bool: True where there is no candidate; None if every entry is one, known without reading the device."""
        if not getattr(self, "_has_gaps") or self.teacher_logprobs_NK is None:  # noqa: B009 - as above
            return None
        return self.teacher_logprobs_NK <= NO_CANDIDATE / 2

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LossInputs:
        """The same record on another device; already checked, so nothing is read back. The teacher's head is
        not moved: it is loaded once, on the device where the loss runs."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> LossInputs:
        """The same record in page-locked memory, from which a GPU copies while the host goes on."""
        return self._map(lambda tensor: tensor.pin_memory())

    def rows(self, start: int, stop: int) -> LossInputs:
        """Tokens start … stop−1 as views."""
        return self._map(lambda tensor: tensor[start:stop])

    def with_distill_advantages(self, advantages_N: Tensor) -> LossInputs:
        """The same record with `distill_advantages_N` set."""
        copy = self._map(lambda tensor: tensor)
        object.__setattr__(copy, "distill_advantages_N", advantages_N)
        return copy

    def _map(self, change: _TensorMap) -> LossInputs:
        copy = object.__new__(LossInputs)
        for one in fields(self):
            value = getattr(self, one.name)
            object.__setattr__(copy, one.name, change(value) if isinstance(value, Tensor) else value)
        object.__setattr__(copy, "_max_id", self.max_id)
        object.__setattr__(copy, "_has_gaps", getattr(self, "_has_gaps"))  # noqa: B009 - as above
        return copy

    def _check_shapes(self) -> None:
        if self.token_ids_N.ndim != 1 or self.token_ids_N.dtype != torch.int64:
            raise LossInputError(f"token_ids_N must be int64 [N]; got {describe_tensor(self.token_ids_N)}.")
        count = self.num_tokens
        for name in _FLOAT_N + _LONG_N:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != (count,):
                raise LossInputError(
                    f"{name} must have shape [{count}] like token_ids_N; got {describe_tensor(tensor)}."
                )
            if name in _LONG_N and tensor.dtype != torch.int64:
                raise LossInputError(f"{name} must be int64; got {describe_tensor(tensor)}.")
            if name in _FLOAT_N and not tensor.is_floating_point():
                raise LossInputError(f"{name} must be a float tensor; got {describe_tensor(tensor)}.")
        given = self.given_N
        if given is not None and (tuple(given.shape) != (count,) or given.dtype != torch.bool):
            raise LossInputError(f"given_N must be bool [{count}]; got {describe_tensor(given)}.")
        self._check_candidates(count)
        if (self.teacher_hidden_NH is None) != (self.teacher_head is None):
            raise LossInputError(
                "teacher_hidden_NH and teacher_head come together: hidden states mean nothing without the head."
            )
        if self.teacher_hidden_NH is not None and self.teacher_head is not None:
            hidden, width = self.teacher_hidden_NH, self.teacher_head.weight_VH.shape[1]
            if tuple(hidden.shape) != (count, width):
                raise LossInputError(
                    f"teacher_hidden_NH must have shape [{count}, {width}] (tokens × the teacher head's width); "
                    f"got {describe_tensor(hidden)}."
                )

    def _check_candidates(self, count: int) -> None:
        ids, logprobs = self.teacher_ids_NK, self.teacher_logprobs_NK
        if ids is None and logprobs is None:
            return
        if ids is None or logprobs is None:
            raise LossInputError(
                "teacher_ids_NK and teacher_logprobs_NK come together; only one of them was given."
            )
        if ids.ndim != 2 or ids.shape[0] != count or ids.dtype != torch.int64:
            raise LossInputError(f"teacher_ids_NK must be int64 [{count}, K]; got {describe_tensor(ids)}.")
        if ids.shape[1] == 0:
            raise LossInputError("teacher_ids_NK has K = 0 candidates; K must be at least 1.")
        if logprobs.shape != ids.shape or not logprobs.is_floating_point():
            raise LossInputError(
                f"teacher_logprobs_NK must be a float tensor of shape {list(ids.shape)} like teacher_ids_NK; "
                f"got {describe_tensor(logprobs)}."
            )

    def _check_values(self) -> int:
        """Checks the values; returns the largest id, so that the vocabulary check later needs no device
        read."""
        for name in (*_FLOAT_N, "teacher_logprobs_NK", "teacher_hidden_NH"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.numel() and not bool(torch.isfinite(tensor).all()):
                raise LossInputError(
                    f"{name} {_first_bad(tensor)}; every value must be finite (missing data is not 0)."
                )
        if bool((self.weights_N < 0).any()):
            raise LossInputError(
                "weights_N must not be negative; they are reduction weights, not a mask of signs."
            )
        if self.importance_N is not None and bool((self.importance_N < 0).any()):
            raise LossInputError("importance_N must not be negative; it is a ratio of probabilities, or 0.")
        for name in (
            "behaviour_logprobs_N",
            "old_logprobs_N",
            "reference_logprobs_N",
            "teacher_logprobs_NK",
        ):
            tensor = getattr(self, name)
            if tensor is not None and tensor.numel() and float(tensor.max()) > MASS_SLACK:
                raise LossInputError(
                    f"{name} holds {float(tensor.max()):.4g}; a log-probability is at most 0."
                )
        if self.teacher_logprobs_NK is not None and self.num_tokens:
            mass = float(self.teacher_logprobs_NK.float().exp().sum(-1).max())
            if mass > 1 + MASS_SLACK:
                raise LossInputError(
                    f"teacher_logprobs_NK sum to a probability of {mass:.4g} at some token, which exceeds 1: "
                    "they must be full-softmax logprobs at unique ids."
                )
        largest = -1
        for name in ("token_ids_N", "teacher_ids_NK"):
            tensor = getattr(self, name)
            if tensor is None or not tensor.numel():
                continue
            low, high = (int(bound) for bound in torch.aminmax(tensor))
            if low < 0:
                raise LossInputError(f"{name} holds {low}; token ids are at least 0.")
            largest = max(largest, high)
        return largest


@dataclass(frozen=True)
class LossOutput:
    """One objective evaluated on one micro-batch."""

    loss: Tensor
    """Scalar, differentiable: Σ weights_N · l_N. The micro-batch losses of one step add up."""
    per_token_N: Tensor
    """float32, detached: l_N before the reduction weights."""
    logprobs_N: Tensor
    """float32, detached: the student's logprob of each written token, under the weights of this forward pass."""
    metrics: dict[str, Metric]
    """Sums, minima and maxima; detached, on the device. `merge_metrics` combines those of micro-batches."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 [N] each, detached: what the metrics were made of, by the names of `losses/diagnostics.py`."""


def describe_tensor(tensor: Tensor) -> str:
    """Shape and dtype for error messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_head(
    side: str,
    hidden_NH: Tensor | None,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    softcap: float | None,
    temperature: float,
) -> None:
    if weight_VH.ndim != 2 or not weight_VH.is_floating_point():
        raise LossInputError(
            f"{side} weight_VH must be a float tensor [V, H]; got {describe_tensor(weight_VH)}."
        )
    vocab, width = weight_VH.shape
    if hidden_NH is not None:
        if hidden_NH.ndim != 2 or hidden_NH.shape[1] != width:
            raise LossInputError(
                f"{side} hidden_NH must have shape [N, {width}] to meet weight_VH {list(weight_VH.shape)}; "
                f"got {describe_tensor(hidden_NH)}."
            )
        if hidden_NH.dtype != weight_VH.dtype:
            raise LossInputError(
                f"{side} hidden_NH is {describe_tensor(hidden_NH)} and weight_VH {describe_tensor(weight_VH)}; "
                "cast one of them so that both have one dtype."
            )
    if bias_V is not None and (tuple(bias_V.shape) != (vocab,) or bias_V.dtype != weight_VH.dtype):
        raise LossInputError(
            f"{side} bias_V must be {str(weight_VH.dtype).removeprefix('torch.')} [{vocab}]; got {describe_tensor(bias_V)}."
        )
    if softcap is not None:
        _check_positive(f"{side} softcap", softcap)
    _check_positive(f"{side} temperature", temperature)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise LossInputError(f"{name} must be a positive finite number; got {value!r}.")


def _first_bad(tensor: Tensor) -> str:
    index = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    return f"holds {float(tensor[tuple(index)])} at index {index}"
