"""`Objective`: one call from the student's hidden states (or logits) and a record of inputs to a loss.

    objective = Objective(kind="forward_kl", signal="topk")
    output = objective(StudentHead(hidden_NH, weight_VH), inputs)
    output.loss.backward()

An objective is built from plain arguments, named as the keys of a recipe's `[loss]` table, and knows nothing
of config, devices or distribution. Settings that make no sense are refused at construction, with the reason.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from understudy.errors import LossInputError
from understudy.losses.advantages import discounted_distillation
from understudy.losses.diagnostics import build_metrics
from understudy.losses.estimators import estimate
from understudy.losses.fused.chunks import fused_token_losses
from understudy.losses.plain import plain_token_losses
from understudy.losses.settings import ObjectiveSettings
from understudy.types.loss import LossInputs, LossOutput, StudentHead, StudentLogits


class Objective(ObjectiveSettings):
    """loss = Σ_N weights_N · (distill_coef · distillation_N + task_coef · policy_N + kl_coef · reference_kl_N
    + sft_coef · cross_entropy_N)."""

    def __call__(self, student: StudentHead | StudentLogits, inputs: LossInputs) -> LossOutput:
        """Loss of one micro-batch; `.loss.backward()` reaches the hidden states (or logits), head weight and bias."""
        student = self._shared_vocabulary(student, inputs)
        self._check(student, inputs)
        discounted = self.distill_coef > 0 and self.policy_gradient and self.discount > 0
        if discounted and inputs.distill_advantages_N is None:
            inputs = inputs.with_distill_advantages(self._discounted(inputs))
        if isinstance(student, StudentLogits):
            loss, columns = plain_token_losses(self, student, inputs)
        else:
            loss, columns = fused_token_losses(self, student, inputs)
        return LossOutput(loss, columns["loss"], columns["logp"], build_metrics(columns, inputs), columns)

    def _discounted(self, inputs: LossInputs) -> Tensor:
        """A discounted advantage depends on later tokens, so it is computed from logprobs known before the
        step."""
        known = inputs.behaviour_logprobs_N if inputs.old_logprobs_N is None else inputs.old_logprobs_N
        if known is None or inputs.sequence_ids_N is None or inputs.teacher_logprobs_N is None:
            raise LossInputError(
                f"discount = {self.discount:g} needs sequence_ids_N, teacher_logprobs_N and the student's logprobs from "
                "before the step (old_logprobs_N or behaviour_logprobs_N); at least one is missing."
            )
        signal = estimate(self.kind.removesuffix("+"), known, inputs.teacher_logprobs_N)
        if self.loss_max_clamp is not None:
            signal = signal.clamp(-self.loss_max_clamp, self.loss_max_clamp)
        return discounted_distillation(signal, inputs.sequence_ids_N, self.discount)

    def _shared_vocabulary(
        self, student: StudentHead | StudentLogits, inputs: LossInputs
    ) -> StudentHead | StudentLogits:
        """Heads of one family differ in padding rows (151936 and 152064): both sides are cut to the shorter one."""
        if not self.uses_full_vocabulary or inputs.teacher_head is None:
            return student
        shared = min(student.vocab_size, inputs.teacher_head.weight_VH.shape[0])
        if shared == student.vocab_size:
            return student
        if isinstance(student, StudentLogits):
            return replace(student, logits_NV=student.logits_NV[:, :shared])
        bias_V = None if student.bias_V is None else student.bias_V[:shared]
        return replace(student, weight_VH=student.weight_VH[:shared], bias_V=bias_V)

    def _check(self, student: StudentHead | StudentLogits, inputs: LossInputs) -> None:
        rows = student.logits_NV if isinstance(student, StudentLogits) else student.hidden_NH
        if rows.shape[0] != inputs.num_tokens:
            raise LossInputError(
                f"the student has {rows.shape[0]} rows, the inputs {inputs.num_tokens} tokens; they must be the same tokens."
            )
        usable = student.usable if isinstance(student, StudentHead) else None
        ids = student.vocab_size if usable is None else usable.limit
        if inputs.max_id >= ids:
            raise LossInputError(
                f"token id {inputs.max_id} is outside the vocabulary of {ids} ids that student and teachers share."
            )
        if self.uses_candidates and inputs.teacher_ids_NK is None:
            raise LossInputError(
                f"signal = {self.signal!r} needs teacher_ids_NK and teacher_logprobs_NK; they are missing."
            )
        if self.uses_full_vocabulary and inputs.teacher_hidden_NH is None:
            raise LossInputError(
                "signal = 'hidden' needs teacher_hidden_NH and teacher_head; they are missing."
            )
        temperature = inputs.teacher_head.temperature if inputs.teacher_head is not None else 1.0
        if temperature != 1.0 and not self.uses_full_vocabulary:
            raise LossInputError(
                f"teacher temperature {temperature:g} is declared, but {self.kind} on {self.signal!r} compares "
                "log-probabilities at temperature 1."
            )
        if inputs.token_ids_N.device != rows.device:
            raise LossInputError(
                f"the student is on {rows.device}, the inputs on {inputs.token_ids_N.device}; use inputs.to(device)."
            )
