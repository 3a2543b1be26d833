"""Per-token losses from the student's log-probabilities of a few ids; combines all loss terms.

Every path (plain, chunked, Triton) reduces a row of logits to a `StudentView`, calls `token_losses` on it
and applies the chain rule from the view's gradients back to the logits. So each formula exists once.

Shape legend: N tokens (a chunk of them, in the fused paths), K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from understudy.errors import LossInputError
from understudy.losses.describe import ESTIMATOR_FORMULAS
from understudy.losses.divergences import DivergenceParameters, divergence
from understudy.losses.estimators import estimate
from understudy.losses.policy import ClipSettings, PolicyLoss, policy_loss
from understudy.losses.tails import Tail, compared_outcomes
from understudy.types.loss import LossInputs
from understudy.types.scores import NO_CANDIDATE


@dataclass(frozen=True)
class StudentView:
    """What a loss may read of the student at each token: differentiable leaves first, then detached values."""

    logp_N: Tensor
    """log q of the written token."""
    logp_NK: Tensor | None = None
    """log q of the candidates."""
    log_tail_N: Tensor | None = None
    """log of q's mass outside the candidates; None without a tail bucket."""
    divergence_N: Tensor | None = None
    """The divergence itself, if a kernel computes it (then `logp_NK` and `log_tail_N` are not leaves)."""
    entropy_N: Tensor | None = None
    """Detached: entropy of q."""
    student_mass_N: Tensor | None = None
    """Detached: q's mass on the candidates, if a kernel computes it."""
    teacher_mass_N: Tensor | None = None
    """Detached: p's mass on the candidates, if a kernel computes it."""


class TokenTerms(Protocol):
    """The settings `token_losses` reads; `Objective` has them all. Kinds are canonical (no aliases)."""

    @property
    def kind(self) -> str: ...
    @property
    def signal(self) -> str: ...
    @property
    def tail(self) -> Tail: ...
    @property
    def parameters(self) -> DivergenceParameters: ...
    @property
    def policy_gradient(self) -> bool: ...
    @property
    def clip(self) -> ClipSettings: ...
    @property
    def distill_coef(self) -> float: ...
    @property
    def task_coef(self) -> float: ...
    @property
    def kl_coef(self) -> float: ...
    @property
    def kl_kind(self) -> str: ...
    @property
    def sft_coef(self) -> float: ...
    @property
    def per_token_clamp(self) -> float | None: ...
    @property
    def loss_max_clamp(self) -> float | None: ...
    @property
    def log_prob_min_clamp(self) -> float | None: ...
    @property
    def clamp_at_zero(self) -> bool: ...


def token_losses(
    terms: TokenTerms, view: StudentView, inputs: LossInputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """(l_N differentiable, columns): the combined loss of each token and detached per-token columns for metrics."""
    columns: dict[str, Tensor] = {"logp": view.logp_N.detach()}
    if view.entropy_N is not None:
        columns["entropy"] = view.entropy_N
    if inputs.behaviour_logprobs_N is not None:
        columns["engine_diff"] = (columns["logp"] - inputs.behaviour_logprobs_N).abs()
    total = torch.zeros_like(view.logp_N)
    if terms.distill_coef > 0:
        distill = _distill_term(terms, view, inputs, columns)
        if terms.per_token_clamp is not None:
            distill = _scale_down(distill, terms.per_token_clamp, columns)
        columns["distill"] = distill.detach()
        total = total + terms.distill_coef * distill
    if terms.task_coef > 0:
        if inputs.advantages_N is None:
            raise LossInputError(
                "task_coef is above 0, but advantages_N is missing: compute task advantages first."
            )
        task = _policy_term(terms, view, inputs, inputs.advantages_N)
        _keep_policy_columns(task, columns, prefix="task")
        total = total + terms.task_coef * task.loss_N
    if terms.kl_coef > 0:
        if inputs.reference_logprobs_N is None:
            raise LossInputError("kl_coef is above 0, but reference_logprobs_N is missing: give a reference.")
        reference_kl = _drawn_only(inputs, estimate(terms.kl_kind, view.logp_N, inputs.reference_logprobs_N))
        columns["reference_kl"] = reference_kl.detach()
        total = total + terms.kl_coef * reference_kl
    if terms.sft_coef > 0 and inputs.given_N is not None:
        supervised = torch.where(inputs.given_N, -view.logp_N, 0.0)
        columns["sft"] = supervised.detach()
        total = total + terms.sft_coef * supervised
    if inputs.teacher_logprobs_N is not None:
        columns["k1"] = (view.logp_N.detach() - inputs.teacher_logprobs_N).float()
    columns["loss"] = total.detach()
    return total, columns


def _distill_term(
    terms: TokenTerms, view: StudentView, inputs: LossInputs, columns: dict[str, Tensor]
) -> Tensor:
    if terms.kind in ESTIMATOR_FORMULAS:
        if terms.policy_gradient:
            return _distill_policy_gradient(terms, view, inputs, columns)
        estimates = _drawn_only(inputs, estimate(terms.kind, view.logp_N, _teacher_sampled(inputs)))
        return _clamped(terms, estimates, columns)
    found = _divergence(terms, view, inputs, columns)
    if terms.clamp_at_zero:
        found = found.clamp_min(0.0)
    return _clamped(terms, found, columns)


def _divergence(
    terms: TokenTerms, view: StudentView, inputs: LossInputs, columns: dict[str, Tensor]
) -> Tensor:
    if terms.signal == "hidden":
        assert view.divergence_N is not None
        return view.divergence_N
    assert inputs.teacher_logprobs_NK is not None
    none_NK = inputs.no_candidate_NK
    _keep_candidate_columns(view, inputs.teacher_logprobs_NK, none_NK, columns)
    if view.divergence_N is not None:
        found = view.divergence_N
    else:
        assert view.logp_NK is not None
        log_p, log_q = compared_outcomes(
            inputs.teacher_logprobs_NK,
            view.logp_NK,
            view.log_tail_N,
            terms.tail,
            terms.log_prob_min_clamp,
            none_NK,
        )
        found = divergence(terms.kind, log_p, log_q, terms.parameters)
    # A token without candidates has the tail alone, which is 1 on both sides up to rounding.
    return found if none_NK is None else torch.where(none_NK.all(-1), 0.0, found)


def _clamped(terms: TokenTerms, values_N: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Clamps to [-loss_max_clamp, loss_max_clamp]; the gradient of a clamped token is 0. The column lets a
    metric count them."""
    limit = terms.loss_max_clamp
    if limit is None:
        return values_N
    columns["clamped"] = (values_N.detach().abs() > limit).float()
    return values_N.clamp(-limit, limit)


def _distill_policy_gradient(
    terms: TokenTerms, view: StudentView, inputs: LossInputs, columns: dict[str, Tensor]
) -> Tensor:
    if inputs.distill_advantages_N is not None:
        advantages = inputs.distill_advantages_N
    else:
        value_kind = terms.kind.removesuffix("+")
        estimates = _drawn_only(inputs, estimate(value_kind, view.logp_N.detach(), _teacher_sampled(inputs)))
        advantages = -_clamped(terms, estimates, columns)
    result = _policy_term(terms, view, inputs, advantages)
    _keep_policy_columns(result, columns, prefix="distill")
    return result.loss_N


def _policy_term(
    terms: TokenTerms, view: StudentView, inputs: LossInputs, advantages_N: Tensor
) -> PolicyLoss:
    found = policy_loss(
        view.logp_N,
        advantages_N,
        inputs.behaviour_logprobs_N,
        inputs.old_logprobs_N,
        terms.clip,
        inputs.importance_N,
    )
    return found._replace(loss_N=_drawn_only(inputs, found.loss_N))


def _drawn_only(inputs: LossInputs, values_N: Tensor) -> Tensor:
    """0 at tokens of given answers: estimators, ratios and policy gradients assume that the student drew the
    token."""
    return values_N if inputs.given_N is None else torch.where(inputs.given_N, 0.0, values_N)


def _teacher_sampled(inputs: LossInputs) -> Tensor:
    if inputs.teacher_logprobs_N is None:
        raise LossInputError(
            "estimators need teacher_logprobs_N (log p of the written token), which is missing."
        )
    return inputs.teacher_logprobs_N


def _scale_down(distill_N: Tensor, limit: float, columns: dict[str, Tensor]) -> Tensor:
    """Scales a token's loss above the limit down to it. Its gradient shrinks by the same factor and never
    vanishes, unlike a clamp's; the column lets a metric count how often it happened."""
    values = distill_N.detach()
    over = values > limit
    columns["clamped"] = over.float()
    return distill_N * torch.where(over, limit / values.clamp_min(limit), torch.ones_like(values))


def _keep_policy_columns(result: PolicyLoss, columns: dict[str, Tensor], prefix: str) -> None:
    columns[f"{prefix}_pg"] = result.loss_N.detach()
    columns[f"{prefix}_approx_kl"] = -result.log_ratio_N
    columns[f"{prefix}_clipped"] = result.clipped_N
    columns[f"{prefix}_clipped_lower"] = result.clipped_lower_N
    columns[f"{prefix}_importance"] = result.importance_N


def _keep_candidate_columns(
    view: StudentView, teacher_NK: Tensor, none_NK: Tensor | None, columns: dict[str, Tensor]
) -> None:
    if view.student_mass_N is not None and view.teacher_mass_N is not None:
        columns["student_mass"], columns["teacher_mass"] = view.student_mass_N, view.teacher_mass_N
    elif view.logp_NK is not None:
        student_NK = view.logp_NK.detach().float()
        if none_NK is not None:
            student_NK = torch.where(none_NK, NO_CANDIDATE, student_NK)
        columns["student_mass"] = student_NK.exp().sum(-1)
        columns["teacher_mass"] = teacher_NK.float().exp().sum(-1)
