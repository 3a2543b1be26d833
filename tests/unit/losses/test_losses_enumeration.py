"""Gradients against exact enumeration on small softmaxes: every divergence, every estimator, the policy gradient.

The expected figures are written out again in numpy, straight from the definitions, and differentiated by central
differences in float64; nothing of the code under test is used to make them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from understudy.losses.objective import Objective
from understudy.types.loss import LossInputs, StudentHead, StudentLogits, TeacherHead

VOCAB, CANDIDATES = 9, 4
BETA, ALPHA, WEIGHT = 0.3, 0.2, 0.35
Function = Callable[[np.ndarray], float]


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def kl(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sum(a * np.log(a / b)))


DEFINITIONS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: (
        BETA * kl(p, BETA * p + (1 - BETA) * q) + (1 - BETA) * kl(q, BETA * p + (1 - BETA) * q)
    ),
    "skew_forward_kl": lambda p, q: kl(p, ALPHA * p + (1 - ALPHA) * q),
    "skew_reverse_kl": lambda p, q: kl(q, ALPHA * q + (1 - ALPHA) * p),
    "tvd": lambda p, q: 0.5 * float(np.abs(p - q).sum()),
    "mixture": lambda p, q: WEIGHT * kl(p, q) + (1 - WEIGHT) * kl(q, p),
}


def numeric_gradient(function: Function, z: np.ndarray, step: float = 1e-5) -> np.ndarray:
    gradient = np.zeros_like(z)
    for index in range(len(z)):
        forward, backward = z.copy(), z.copy()
        forward[index] += step
        backward[index] -= step
        gradient[index] = (function(forward) - function(backward)) / (2 * step)
    return gradient


def outcomes(p: np.ndarray, ids: np.ndarray, tail: str) -> np.ndarray:
    inside = p[ids]
    if tail == "bucket":
        return np.append(inside, 1 - inside.sum())
    return inside / inside.sum() if tail == "renormalise" else inside


def random_pair(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=VOCAB) * 1.5, softmax(generator.normal(size=VOCAB) * 1.5)


def run(objective: Objective, z: np.ndarray, inputs: LossInputs, path: str) -> tuple[float, np.ndarray]:
    leaf = torch.tensor(z, dtype=torch.float64).reshape(inputs.num_tokens, -1).requires_grad_()
    head = StudentHead(leaf, torch.eye(leaf.shape[1], dtype=torch.float64))
    output = objective(StudentLogits(leaf) if path == "plain" else head, inputs)
    output.loss.backward()
    return output.loss.item(), leaf.grad.numpy()


def divergence_inputs(p: np.ndarray, ids: np.ndarray | None) -> LossInputs:
    logprobs = torch.tensor(np.log(p))
    common = {"token_ids_N": torch.tensor([0]), "weights_N": torch.ones(1, dtype=torch.float64)}
    if ids is None:
        head = TeacherHead(torch.eye(VOCAB, dtype=torch.float64))
        return LossInputs(**common, teacher_hidden_NH=logprobs[None], teacher_head=head)
    chosen = torch.tensor(ids)
    return LossInputs(**common, teacher_ids_NK=chosen[None], teacher_logprobs_NK=logprobs[chosen][None])


@pytest.mark.parametrize("path", ["plain", "fused"])
@pytest.mark.parametrize("kind", DEFINITIONS)
@pytest.mark.parametrize(
    ("signal", "tail"),
    [
        ("hidden", "bucket"),
        ("topk", "bucket"),
        ("topk", "renormalise"),
        ("topk", "drop"),
        ("at_ids", "bucket"),
    ],
)
def test_divergences_and_their_gradients_equal_their_definitions(
    kind: str, signal: str, tail: str, path: str
) -> None:
    z, p = random_pair(seed=len(kind))
    best = {"hidden": None, "topk": np.argsort(-p)[:CANDIDATES], "at_ids": np.argsort(-z)[:CANDIDATES]}[
        signal
    ]
    definition = DEFINITIONS[kind]

    def expected(logits: np.ndarray) -> float:
        q = softmax(logits)
        return (
            definition(p, q) if best is None else definition(outcomes(p, best, tail), outcomes(q, best, tail))
        )

    objective = Objective(kind, signal, tail, beta=BETA, alpha=ALPHA, mixture_weight=WEIGHT)
    value, gradient = run(objective, z, divergence_inputs(p, best), path)
    assert value == pytest.approx(expected(z), abs=1e-9)
    np.testing.assert_allclose(gradient[0], numeric_gradient(expected, z), atol=1e-8)


def all_tokens(p: np.ndarray, q: np.ndarray) -> LossInputs:
    """One row per possible token, weighted by its probability: the sum over rows is the expectation over y ~ q."""
    return LossInputs(
        token_ids_N=torch.arange(VOCAB),
        weights_N=torch.tensor(q),
        teacher_logprobs_N=torch.tensor(np.log(p)),
        behaviour_logprobs_N=torch.tensor(np.log(q)),
    )


def expected_gradient(objective: Objective, z: np.ndarray, p: np.ndarray, path: str) -> np.ndarray:
    _, gradient = run(objective, np.tile(z, VOCAB), all_tokens(p, softmax(z)), path)
    return gradient.sum(0)


@pytest.mark.parametrize("path", ["plain", "fused"])
@pytest.mark.parametrize(
    ("kind", "policy_gradient", "truth"),
    [
        ("k2", False, "reverse_kl"),
        ("mse", False, "reverse_kl"),
        ("k1+", False, "reverse_kl"),
        ("k3+", False, "reverse_kl"),
        ("k3", False, "forward_kl"),
        ("low_var_kl", False, "forward_kl"),
        ("k1", True, "reverse_kl"),
        ("kl", True, "reverse_kl"),
    ],
)
def test_the_expected_gradient_of_each_estimator_is_that_of_its_divergence(
    kind: str, policy_gradient: bool, truth: str, path: str
) -> None:
    z, p = random_pair(seed=3)
    found = expected_gradient(Objective(kind, "sampled", policy_gradient=policy_gradient), z, p, path)
    definition = DEFINITIONS[truth]
    np.testing.assert_allclose(
        found, numeric_gradient(lambda logits: definition(p, softmax(logits)), z), atol=1e-7
    )


def test_abs_moves_each_token_by_the_sign_of_its_log_ratio() -> None:
    z, p = random_pair(seed=4)
    q = softmax(z)
    sign = np.sign(np.log(q / p))
    expected = q * sign - q * np.sum(q * sign)
    np.testing.assert_allclose(
        expected_gradient(Objective("abs", "sampled"), z, p, "fused"), expected, atol=1e-9
    )


def test_k1_as_a_loss_has_zero_expected_gradient() -> None:
    """Why it is refused: Σ q·∇log q = 0, whatever the teacher says."""
    from understudy.losses.estimators import k1

    z, p = random_pair(seed=5)
    leaf = torch.tensor(z, requires_grad=True)
    log_q = torch.log_softmax(leaf, -1)
    (log_q.detach().exp() * k1(log_q - torch.tensor(np.log(p)))).sum().backward()
    np.testing.assert_allclose(leaf.grad.numpy(), 0, atol=1e-12)


def test_a_divergence_as_an_advantage_has_zero_expected_gradient() -> None:
    """Why it is refused: E[∇log q(y) · A] = 0 when A does not depend on y."""
    z, _ = random_pair(seed=6)
    leaf = torch.tensor(z, requires_grad=True)
    log_q = torch.log_softmax(leaf, -1)
    (log_q.detach().exp() * log_q * -0.7).sum().backward()
    np.testing.assert_allclose(leaf.grad.numpy(), 0, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_clipped_policy_gradient_equals_its_enumeration_over_every_token(seed: int) -> None:
    """The off-policy policy gradient: Σ_y behaviour(y) · ∇[−min(ρA, clip(ρ)A)] for A = −k1, enumerated."""
    generator = np.random.default_rng(seed)
    z, p = random_pair(seed)
    q, behaviour = softmax(z), softmax(z + 0.4 * generator.normal(size=VOCAB))
    advantage = -(np.log(q) - np.log(p))
    low, high, dual = 0.2, 0.28, 1.3
    inputs = LossInputs(
        token_ids_N=torch.arange(VOCAB),
        weights_N=torch.tensor(behaviour),
        teacher_logprobs_N=torch.tensor(np.log(p)),
        behaviour_logprobs_N=torch.tensor(np.log(behaviour)),
    )
    objective = Objective("k1", "sampled", policy_gradient=True, clip_low=low, clip_high=high, dual_clip=dual)

    def expected(logits: np.ndarray) -> float:
        ratio = softmax(logits) / behaviour
        loss = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 1 - low, 1 + high))
        loss = np.where(advantage < 0, np.minimum(loss, -advantage * dual), loss)
        return float(np.sum(behaviour * loss))

    value, gradient = run(objective, np.tile(z, VOCAB), inputs, "fused")
    assert value == pytest.approx(expected(z), abs=1e-9)
    np.testing.assert_allclose(gradient.sum(0), numeric_gradient(expected, z), atol=1e-6)
