"""Random students and teachers for the loss tests, and the fp64 reference they are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import understudy.losses.divergences
from understudy.losses.objective import Objective
from understudy.losses.plain import head_logits
from understudy.types.loss import LossInputs, LossOutput, StudentHead, StudentLogits, TeacherHead

DIVERGENCES = tuple(understudy.losses.divergences.DIVERGENCES)


@dataclass
class Case:
    """One student head with one record of inputs, in float64; `cast` gives the same values in another dtype."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    logit_scale: float
    temperature: float
    inputs: LossInputs

    def student(self, dtype: torch.dtype, requires_grad: bool = True) -> StudentHead:
        def leaf(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(dtype).requires_grad_(requires_grad)

        return StudentHead(
            leaf(self.hidden),
            leaf(self.weight),
            leaf(self.bias),
            self.softcap,
            self.logit_scale,
            self.temperature,
        )

    def reference(self, objective: Objective, rounded_to: torch.dtype) -> tuple[LossOutput, list[Tensor]]:
        """The plain loss in float64, on the values that `rounded_to` can represent."""
        leaves = [
            None if tensor is None else tensor.to(rounded_to).double().requires_grad_()
            for tensor in (self.hidden, self.weight, self.bias)
        ]
        head = StudentHead(*leaves, softcap=self.softcap, logit_scale=self.logit_scale)
        output = objective(StudentLogits(head_logits(leaves[0], head), self.temperature), double(self.inputs))
        output.loss.backward()
        return output, [leaf.grad for leaf in leaves if leaf is not None]


def make_case(
    seed: int = 0,
    tokens: int = 23,
    width: int = 12,
    vocab: int = 61,
    candidates: int = 5,
    *,
    bias: bool = True,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    teacher_padding: int = 3,
    spread: float = 2.0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """`dtype` is the one hidden states and heads are rounded to, so that a reference sees the same numbers; `spread` is
    the standard deviation of the logits (bfloat16 rounds a logit z by up to |z|/256, so its error grows with it)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

    hidden = normal(tokens, width)
    weight = normal(vocab, width) * (spread / width**0.5)
    teacher_hidden = normal(tokens, width + 4)
    teacher_weight = normal(vocab + teacher_padding, width + 4) * (spread / (width + 4) ** 0.5)
    log_p = torch.log_softmax(1.5 * normal(tokens, vocab), -1).float()
    best = log_p.topk(candidates)
    token_ids = torch.randint(0, vocab, (tokens,), generator=generator)
    token_ids[: tokens // 2] = best.indices[: tokens // 2, 0]
    weight, teacher_weight = weight.to(dtype).double(), teacher_weight.to(dtype).double()
    inputs = LossInputs(
        token_ids_N=token_ids,
        weights_N=torch.rand(tokens, generator=generator),
        positions_N=torch.arange(tokens),
        sequence_ids_N=torch.arange(tokens) // 7,
        teacher_logprobs_N=log_p.gather(1, token_ids[:, None])[:, 0],
        teacher_ids_NK=best.indices,
        teacher_logprobs_NK=best.values,
        teacher_hidden_NH=teacher_hidden.to(dtype),
        teacher_head=TeacherHead(teacher_weight.to(dtype), temperature=teacher_temperature),
        behaviour_logprobs_N=-2.5 - torch.rand(tokens, generator=generator) * 3,
        advantages_N=torch.randn(tokens, generator=generator),
    )
    bias_V = normal(vocab) if bias else None
    return Case(hidden, weight, bias_V, softcap, logit_scale, temperature, inputs)


def double(inputs: LossInputs) -> LossInputs:
    """The same record with every float in float64."""
    head = inputs.teacher_head
    copy = inputs._map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    if head is not None:
        bias = None if head.bias_V is None else head.bias_V.double()
        wide = TeacherHead(head.weight_VH.double(), bias, head.softcap, head.logit_scale, head.temperature)
        object.__setattr__(copy, "teacher_head", wide)
    return copy


def gradients(student: StudentHead) -> list[Tensor]:
    return [leaf.grad for leaf in (student.hidden_NH, student.weight_VH, student.bias_V) if leaf is not None]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN anywhere gives NaN, which no comparison passes."""
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-30)).item()


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = relative_error(found, expected)
    assert error <= tolerance or (expected.double().norm() == 0 and found.double().norm() == 0), error
