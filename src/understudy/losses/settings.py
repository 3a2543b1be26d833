"""The settings of an objective, checked when they are made; `Objective` adds the computation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from understudy.losses.describe import (
    ESTIMATOR_FORMULAS,
    ObjectiveDescription,
    canonical_kind,
    describe_objective,
)
from understudy.losses.divergences import DivergenceParameters
from understudy.losses.policy import ClipSettings
from understudy.losses.tails import Tail

Backend = Literal["auto", "torch", "triton"]


@dataclass(frozen=True)
class ObjectiveSettings:
    """loss = Σ_N weights_N · (distill_coef · distillation_N + task_coef · policy_N + kl_coef · reference_kl_N
    + sft_coef · cross_entropy_N)."""

    kind: str
    """A divergence or an estimator; aliases (`mse`, `low_var_kl`, `kl`) are resolved at construction."""
    signal: str = "topk"
    """What the teacher sent: sampled | topk | at_ids | hidden."""
    tail: Tail = "bucket"
    """What is done with the mass outside the candidates."""
    beta: float = 0.5
    alpha: float = 0.1
    mixture_weight: float = 0.5
    policy_gradient: bool = False
    """Use −sg(estimator) as an advantage instead of differentiating it."""
    distill_coef: float = 1.0
    task_coef: float = 0.0
    """Above 0 adds a clipped policy loss on `advantages_N`."""
    kl_coef: float = 0.0
    """Above 0 adds an estimate of KL to the frozen reference (`reference_logprobs_N`)."""
    kl_kind: str = "k3"
    sft_coef: float = 0.0
    """Above 0 adds −log q(y) at tokens of given answers (`given_N`)."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    tis_cap: float | None = None
    discount: float = 0.0
    per_token_clamp: float | None = None
    loss_max_clamp: float | None = None
    """verl's two-sided clamp, before an estimator becomes an advantage."""
    log_prob_min_clamp: float | None = None
    """verl's floor of both sides' log-probabilities (`tail = "drop"` only)."""
    clamp_at_zero: bool = False
    """verl's floor of the sum over K candidates (`tail = "drop"` only)."""
    backend: Backend = "auto"
    """Which fused path: Triton on a CUDA device by default, chunked torch on any other."""
    chunk_bytes: int | None = None
    """Upper bound of the working memory of a fused path; None uses a default for the device."""
    description: ObjectiveDescription = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        description = describe_objective(
            self.kind, self.signal, self.tail,
            beta=self.beta, alpha=self.alpha, mixture_weight=self.mixture_weight,
            policy_gradient=self.policy_gradient, distill_coef=self.distill_coef, task_coef=self.task_coef,
            clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip, tis_cap=self.tis_cap,
            discount=self.discount, per_token_clamp=self.per_token_clamp, kl_coef=self.kl_coef, kl_kind=self.kl_kind,
            sft_coef=self.sft_coef,
            loss_max_clamp=self.loss_max_clamp, log_prob_min_clamp=self.log_prob_min_clamp,
            clamp_at_zero=self.clamp_at_zero,
        )  # fmt: skip
        object.__setattr__(self, "description", description)
        object.__setattr__(self, "kind", canonical_kind(self.kind))

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def formula(self) -> str:
        return self.description.formula

    @property
    def parameters(self) -> DivergenceParameters:
        return DivergenceParameters(self.beta, self.alpha, self.mixture_weight)

    @property
    def clip(self) -> ClipSettings:
        return ClipSettings(self.clip_low, self.clip_high, self.dual_clip, self.tis_cap)

    @property
    def uses_candidates(self) -> bool:
        """Whether the loss reads the student at K candidate ids."""
        return (
            self.distill_coef > 0
            and self.kind not in ESTIMATOR_FORMULAS
            and self.signal in ("topk", "at_ids")
        )

    @property
    def uses_full_vocabulary(self) -> bool:
        """Whether the loss compares with the teacher's whole distribution."""
        return self.distill_coef > 0 and self.kind not in ESTIMATOR_FORMULAS and self.signal == "hidden"
