"""`[loss]`: what the student learns from. `understudy check` prints the objective these keys make."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from understudy.config.base import Section

LossKind = Literal[
    "forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd", "mixture",
    "k1", "k1+", "k2", "k3", "k3+", "abs", "kl", "mse", "low_var_kl",
]  # fmt: skip


class CorrectionConfig(Section):
    """`[loss.correction]`: corrects for the engine's sampling probabilities differing from the trainer's own
    before the step.

    `weigh` and `drop` first compute the trainer's probabilities (one more forward pass per step) and then multiply
    policy gradients; divergences do not change. The metrics `rollout_corr/*` show how much the two differ.
    """

    weigh: Literal["off", "token", "sequence", "geometric"] = "off"
    """Truncated importance sampling: multiply by min(ratio, `cap`), with the ratio of the token, of its sequence
    (the product), or the geometric mean over its sequence."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight (`weigh`)."""
    drop: Literal["off", "token", "sequence", "geometric"] = "off"
    """Drop tokens or sequences with a ratio outside [`low`, `high`]."""
    low: Annotated[float, Field(ge=0)] = 0.5
    """Lower end of the ratios that are kept (`drop`)."""
    high: Annotated[float, Field(gt=0)] = 2.0
    """Upper end of the ratios that are kept (`drop`)."""
    measure: bool = False
    """Only compute and log the mismatch."""


class LossConfig(Section):
    """`[loss]`: what the student learns from."""

    kind: LossKind = "forward_kl"
    """The divergence between teacher and student that is minimised, or an estimator of it from the written token
    (`k1` … `low_var_kl`)."""
    signal: Literal["sampled", "topk", "at_ids", "hidden"] = "topk"
    """What the teachers send per token: the log-probability of the written token (`sampled`), their K best tokens
    (`topk`), their scores at the student's K best (`at_ids`), or hidden states (`hidden`)."""
    topk: Annotated[int, Field(ge=1)] = 64
    """Candidates per token (`topk` and `at_ids`)."""
    tail: Literal["bucket", "renormalise", "drop"] = "bucket"
    """How the probability outside the K candidates counts. `bucket`: as one more outcome; `renormalise`: not at all,
    and the candidates are rescaled to sum to 1; `drop`: not at all."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """`jsd`: 0 is forward KL, 1 is reverse KL."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """`skew_*`: share of the other distribution that is mixed in."""
    mixture_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """`mixture`: weight of forward KL; the rest is reverse KL."""
    policy_gradient: bool = False
    """Use the estimator as a per-token advantage instead of differentiating it."""
    distill_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the distillation term; 0 turns distillation off."""
    task_coef: Annotated[float, Field(ge=0)] = 0.0
    """Above 0 adds a policy loss on task rewards."""
    sft_coef: Annotated[float, Field(ge=0)] = 0.0
    """Above 0 adds the cross-entropy of the tokens of given answers (`rollout.off_policy`)."""
    advantage: Literal["grpo", "grpo_no_std", "rloo", "reinforce++", "gae"] = "grpo"
    """How task rewards become advantages (`task_coef` > 0); `gae` trains a critic beside the student."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of later rewards (`reinforce++`, `gae`)."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """`gae`: 1 relies on the observed rewards, 0 on the critic."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Above 0 keeps the student near a frozen reference (`[reference]`; by default the student as it was at the
    start)."""
    kl_kind: Literal["k1", "k1+", "k2", "k3", "k3+", "abs", "kl", "mse", "low_var_kl"] = "k3"
    """Estimator of the KL to the reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Differentiate the estimate, or subtract it from the task reward of each token."""
    correction: CorrectionConfig = CorrectionConfig()
    reduction: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How the tokens' losses are combined: the mean over all tokens of a step, or first the sum or the mean of
    each sequence and then the mean over sequences."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """Policy gradient: the ratio to the policy before the step is clipped below at 1 − this."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Policy gradient: the ratio is clipped above at 1 + this."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Policy gradient: limits the loss of a token with a negative advantage to this many times the advantage
    (dual clip); by default there is no limit."""
    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Truncated importance sampling: ratios above this are truncated to it."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Policy gradient only: discount with which later tokens count for a token's advantage; 0 uses only the token's
    own score."""
    per_token_clamp: Annotated[float, Field(gt=0)] | None = None
    """A token's loss above this value is scaled down to it, and so is its gradient; metrics count such tokens."""
    loss_max_clamp: Annotated[float, Field(gt=0)] | None = None
    """verl's: clamp each token's estimate or divergence to [-c, c], before k1 becomes an advantage. A
    clamped token has no gradient (a policy gradient keeps it, with the clamped advantage)."""
    log_prob_min_clamp: Annotated[float, Field(lt=0)] | None = None
    """verl's: floor of the K candidates' log-probabilities, on both sides (`tail = "drop"`)."""
    clamp_at_zero: bool = False
    """verl's: a token whose K terms sum to less than 0 counts as 0 and has no gradient (`tail = "drop"`)."""
    student_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the student's logits in the loss; independent of `rollout.temperature`."""
    teacher_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the teacher's logits in the loss. A value other than 1 needs `signal = "hidden"`, because top-k scores
    cannot be computed for another temperature."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """Which fused path computes the loss; `auto` uses Triton on a GPU."""
