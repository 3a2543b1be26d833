"""Given answers compared with the definition: cross-entropy and divergences apply to them, terms for drawn tokens do
not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from understudy.errors import LossInputError
from understudy.losses.objective import Objective
from understudy.types.loss import LossInputs, StudentHead, StudentLogits

VOCAB = 7
GIVEN = np.array([True, False, True, False, True, False])
IDS = np.array([1, 2, 3, 4, 5, 6])
WEIGHTS = np.array([0.1, 0.2, 0.3, 0.15, 0.05, 0.2])
rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(6, VOCAB))
TEACHER = rng.normal(size=(6, VOCAB)) * 1.5
OLD, BEHAVIOUR, REFERENCE = -1 - rng.random((3, 6))
ADVANTAGES, IMPORTANCE = rng.normal(size=6), rng.random(6) + 0.5


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


LOG_P = log_softmax(TEACHER)


def found(objective: Objective, path: str, **more: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    columns = {
        "token_ids_N": IDS, "weights_N": WEIGHTS, "given_N": GIVEN, "teacher_logprobs_N": LOG_P[np.arange(6), IDS],
        "behaviour_logprobs_N": np.where(GIVEN, 0.0, BEHAVIOUR), **more,
    }  # fmt: skip
    inputs = LossInputs(**{name: torch.tensor(column) for name, column in columns.items()})
    leaf = torch.tensor(LOGITS, requires_grad=True)
    head = StudentHead(leaf, torch.eye(VOCAB, dtype=torch.float64))
    output = objective(StudentLogits(leaf) if path == "plain" else head, inputs)
    output.loss.backward()
    metrics = {name: metric.result() for name, metric in output.metrics.items()}
    return output.loss.item(), leaf.grad.numpy(), metrics


def numeric(function: Any) -> np.ndarray:
    gradient = np.zeros_like(LOGITS)
    for place in np.ndindex(LOGITS.shape):
        step = np.zeros_like(LOGITS)
        step[place] = 1e-5
        gradient[place] = (function(LOGITS + step) - function(LOGITS - step)) / 2e-5
    return gradient


@pytest.mark.parametrize("path", ["plain", "fused"])
def test_a_divergence_applies_to_every_token_and_cross_entropy_to_given_ones(path: str) -> None:
    best = np.argsort(-TEACHER, axis=1)[:, :3]
    p = np.take_along_axis(np.exp(LOG_P), best, 1)

    def expected(z: np.ndarray) -> float:
        log_q = log_softmax(z)
        q = np.take_along_axis(np.exp(log_q), best, 1)
        rest_p, rest_q = 1 - p.sum(1), 1 - q.sum(1)
        kl = (p * np.log(p / q)).sum(1) + rest_p * np.log(rest_p / rest_q)
        return float(WEIGHTS @ (kl - 0.3 * GIVEN * log_q[np.arange(6), IDS]))

    topk = {"teacher_ids_NK": best, "teacher_logprobs_NK": np.log(p)}
    loss, gradient, metrics = found(Objective("forward_kl", "topk", sft_coef=0.3), path, **topk)
    assert loss == pytest.approx(expected(LOGITS), abs=1e-9)
    np.testing.assert_allclose(gradient, numeric(expected), atol=1e-8)
    own = log_softmax(LOGITS)[np.arange(6), IDS]
    assert metrics["actor/sft_loss"] == pytest.approx(-own[GIVEN].mean(), abs=1e-6)
    k1 = (own - LOG_P[np.arange(6), IDS])[~GIVEN].mean()
    assert metrics["actor/distillation/k1"] == pytest.approx(k1, abs=1e-6)


POLICY = {
    "old": {"old_logprobs_N": OLD},
    "behaviour": {},
    "importance": {"old_logprobs_N": OLD, "importance_N": IMPORTANCE},
}


@pytest.mark.parametrize("path", ["plain", "fused"])
@pytest.mark.parametrize("anchor", POLICY)
@pytest.mark.parametrize("distilled", ["k1 as an advantage", "k2"])
def test_terms_for_drawn_tokens_are_zero_at_given_ones(distilled: str, anchor: str, path: str) -> None:
    """Task gradient, estimator (as a loss or an advantage) and KL to the reference, compared with their formulas over
    the drawn tokens alone. Their values at given tokens must not matter."""
    as_advantage, drawn = distilled != "k2", ~GIVEN
    r_now = log_softmax(LOGITS)[np.arange(6), IDS] - LOG_P[np.arange(6), IDS]  # constant in an advantage

    def policy(logp: np.ndarray, advantages: np.ndarray) -> np.ndarray:
        ratio = np.exp(logp - (BEHAVIOUR if anchor == "behaviour" else OLD))
        loss = np.maximum(-advantages * ratio, -advantages * ratio.clip(1 - 0.2, 1 + 0.28))
        return loss * (IMPORTANCE if anchor == "importance" else 1.0)

    def expected(z: np.ndarray) -> float:
        logp = log_softmax(z)[np.arange(6), IDS]
        r, to_reference = logp - LOG_P[np.arange(6), IDS], logp - REFERENCE
        distill = policy(logp, -r_now) if as_advantage else r**2 / 2
        drawn_only = (
            0.7 * distill + 0.5 * policy(logp, ADVANTAGES) + 0.2 * (np.exp(-to_reference) - 1 + to_reference)
        )
        return float(WEIGHTS @ np.where(GIVEN, -0.3 * logp, drawn_only))

    kind = {"kind": "k1", "policy_gradient": True} if as_advantage else {"kind": "k2"}
    objective = Objective(
        **kind, signal="sampled", distill_coef=0.7, task_coef=0.5, kl_coef=0.2, sft_coef=0.3
    )
    poison = {"advantages_N": np.where(GIVEN, 1e6, ADVANTAGES)}
    inputs = {"reference_logprobs_N": REFERENCE, **POLICY[anchor], **poison}
    loss, gradient, metrics = found(objective, path, **inputs)
    assert loss == pytest.approx(expected(LOGITS), abs=1e-9)
    np.testing.assert_allclose(gradient, numeric(expected), atol=1e-7)
    own = log_softmax(LOGITS)[np.arange(6), IDS]
    ratio = own - (BEHAVIOUR if anchor == "behaviour" else OLD)
    assert metrics["actor/ppo_kl"] == pytest.approx(-ratio[drawn].mean(), abs=1e-6)


def test_a_truncated_ratio_is_not_taken_at_given_tokens() -> None:
    def expected(z: np.ndarray) -> float:
        logp = log_softmax(z)[np.arange(6), IDS]
        cap = np.minimum(np.exp(OLD - BEHAVIOUR), 1.1)
        ratio = np.exp(logp - OLD)
        loss = cap * np.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clip(0.8, 1.28))
        return float(WEIGHTS @ np.where(GIVEN, 0.0, loss))

    objective = Objective("forward_kl", "topk", distill_coef=0, task_coef=1, tis_cap=1.1)
    loss, gradient, _ = found(objective, "plain", old_logprobs_N=OLD, advantages_N=ADVANTAGES)
    assert loss == pytest.approx(expected(LOGITS), abs=1e-9)
    np.testing.assert_allclose(gradient, numeric(expected), atol=1e-8)


def test_given_tokens_must_be_marked_by_a_bool_mask() -> None:
    ids, weights = torch.tensor([1]), torch.ones(1)
    with pytest.raises(LossInputError, match=r"given_N must be bool \[1\]; got float32 \[1\]"):
        LossInputs(token_ids_N=ids, weights_N=weights, given_N=torch.ones(1))


@pytest.mark.parametrize("kind", [{"kind": "k1", "policy_gradient": True}, {"kind": "k2"}])
def test_given_tokens_are_not_counted_as_clamped(kind: dict[str, Any]) -> None:
    r = log_softmax(LOGITS)[np.arange(6), IDS] - LOG_P[np.arange(6), IDS]
    values = np.abs(r if "policy_gradient" in kind else r**2 / 2)
    limit = float(np.median(values))
    assert (values > limit)[GIVEN].any() and (values > limit)[~GIVEN].any()
    objective = Objective(**kind, signal="sampled", sft_coef=0.3, loss_max_clamp=limit)
    _, _, metrics = found(objective, "plain")
    assert metrics["actor/distillation/clamped_share"] == pytest.approx((values > limit)[~GIVEN].sum() / 6)
