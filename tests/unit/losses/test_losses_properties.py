"""Properties that hold for every input, tested on many random inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_cases import DIVERGENCES, assert_close, gradients, make_case

from understudy.losses.divergences import DivergenceParameters, divergence
from understudy.losses.objective import Objective
from understudy.losses.reduce import batch_totals, token_weights
from understudy.losses.tails import floor_log_tail, log1mexp, teacher_log_tail
from understudy.types.loss import (
    LossInputs,
    StudentHead,
    StudentLogits,
    TeacherHead,
    merge_metrics,
    metric_results,
)

few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 10_000)
spreads = st.floats(0.1, 8.0)


def random_rows(seed: int, spread: float, vocab: int = 17, rows: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * spread


def candidate_inputs(log_p: torch.Tensor, ids: torch.Tensor) -> LossInputs:
    rows = len(log_p)
    return LossInputs(
        token_ids_N=torch.zeros(rows, dtype=torch.int64),
        weights_N=torch.ones(rows, dtype=torch.float64),
        teacher_ids_NK=ids,
        teacher_logprobs_NK=log_p.gather(1, ids),
    )


@given(seed=seeds, spread=spreads, kind=st.sampled_from(DIVERGENCES), candidates=st.integers(1, 16))
@few
def test_bucketed_divergences_are_never_negative_and_never_above_the_full_one(
    seed: int, spread: float, kind: str, candidates: int
) -> None:
    log_p = torch.log_softmax(random_rows(seed, spread), -1)
    logits = random_rows(seed + 1, spread)
    bucketed = Objective(kind)(StudentLogits(logits), candidate_inputs(log_p, log_p.topk(candidates).indices))
    full = divergence(kind, log_p, torch.log_softmax(logits, -1), DivergenceParameters())
    slack = 1e-5 * (1 + full.abs())
    assert (bucketed.per_token_N >= -1e-6).all()
    assert (bucketed.per_token_N <= full + slack).all()


@given(seed=seeds, spread=spreads, kind=st.sampled_from(DIVERGENCES))
@few
def test_candidates_that_are_the_whole_vocabulary_give_the_full_divergence(
    seed: int, spread: float, kind: str
) -> None:
    log_p = torch.log_softmax(random_rows(seed, spread), -1)
    logits = random_rows(seed + 1, spread)
    everything = torch.arange(log_p.shape[1]).expand(len(log_p), -1)
    output = Objective(kind)(StudentLogits(logits), candidate_inputs(log_p, everything))
    full = divergence(kind, log_p, torch.log_softmax(logits, -1), DivergenceParameters())
    torch.testing.assert_close(output.per_token_N, full)


@given(
    seed=seeds,
    spread=st.floats(0.1, 4.0),
    kind=st.sampled_from(DIVERGENCES),
    tail=st.sampled_from(["bucket", "renormalise"]),
)
@few
def test_equal_distributions_have_zero_loss_and_zero_gradient(
    seed: int, spread: float, kind: str, tail: str
) -> None:
    logits = random_rows(seed, spread).requires_grad_()
    log_p = torch.log_softmax(logits.detach(), -1)
    output = Objective(kind, tail=tail)(StudentLogits(logits), candidate_inputs(log_p, log_p.topk(5).indices))
    output.loss.backward()
    assert abs(output.loss.item()) < 1e-5
    limit = (
        1e-5 if kind != "tvd" else 1.0
    )  # |p − q| has a kink at equality: its subgradient is bounded, not zero
    assert float(logits.grad.abs().max()) < limit


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_heads_have_zero_loss_and_gradient_over_the_full_vocabulary(kind: str) -> None:
    case = make_case(seed=8, bias=False, dtype=torch.float32)
    hidden = case.hidden.float().requires_grad_()
    weight = case.weight.float()
    inputs = LossInputs(
        case.inputs.token_ids_N,
        case.inputs.weights_N,
        teacher_hidden_NH=hidden.detach(),
        teacher_head=TeacherHead(weight),
    )
    output = Objective(kind, "hidden")(StudentHead(hidden, weight), inputs)
    output.loss.backward()
    assert abs(output.loss.item()) < 1e-5
    assert float(hidden.grad.abs().max()) < 1e-5


@given(seed=seeds, pieces=st.integers(1, 6), rows_per_chunk=st.integers(1, 24), data=st.data())
@few
def test_loss_and_gradient_do_not_depend_on_how_tokens_are_split(
    seed: int, pieces: int, rows_per_chunk: int, data: st.DataObject
) -> None:
    case = make_case(seed, dtype=torch.float32)
    kind = data.draw(st.sampled_from(["forward_kl", "k2", "jsd"]))
    signal = {"forward_kl": "topk", "k2": "sampled", "jsd": "hidden"}[kind]
    whole_objective = Objective(kind, signal, task_coef=0.5)
    whole = case.student(torch.float32)
    expected = whole_objective(whole, case.inputs)
    expected.loss.backward()

    count = case.inputs.num_tokens
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    shuffled = case.inputs._map(lambda tensor: tensor[order])
    split = case.student(torch.float32)
    objective = Objective(kind, signal, task_coef=0.5, chunk_bytes=rows_per_chunk * 61 * 4 * 2)
    metrics, total = [], 0.0
    for part in torch.arange(count).tensor_split(pieces):
        if len(part) == 0:
            continue
        student = case.student(torch.float32)
        student = type(student)(
            split.hidden_NH[order[part]],
            split.weight_VH,
            split.bias_V,
            case.softcap,
            case.logit_scale,
            case.temperature,
        )
        output = objective(student, shuffled.rows(int(part[0]), int(part[-1]) + 1))
        output.loss.backward()
        total += float(output.loss)
        metrics.append(output.metrics)
    assert total == pytest.approx(float(expected.loss), rel=1e-5)
    for found, wanted in zip(gradients(split), gradients(whole), strict=True):
        assert_close(found, wanted, 1e-5)
    merged, single = metric_results(merge_metrics(metrics)), metric_results(expected.metrics)
    assert merged.keys() == single.keys()
    for name, value in single.items():
        assert merged[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    mode=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]),
    cut=st.integers(0, 8),
)
@few
def test_token_weights_do_not_depend_on_the_split_into_ranks(lengths: list[int], mode: str, cut: int) -> None:
    whole = token_weights(lengths, mode)
    total = batch_totals(lengths)
    parts = [token_weights(part, mode, total) for part in (lengths[:cut], lengths[cut:])]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert bool(torch.isfinite(whole).all())
    if sum(lengths):
        mean = {
            "token-mean": 1.0,
            "seq-mean-token-mean": 1.0,
            "seq-mean-token-sum": total.tokens / total.sequences,
        }
        assert float(whole.sum()) == pytest.approx(mean[mode], rel=1e-5)


@given(x=st.floats(-80, -1e-6))
@settings(max_examples=200, deadline=None)
def test_log1mexp_is_accurate_at_both_ends(x: float) -> None:
    found = float(log1mexp(torch.tensor(x, dtype=torch.float32)))
    rounded = float(torch.tensor(x, dtype=torch.float32))
    expected = math.log(-math.expm1(rounded)) if rounded > -0.7 else math.log1p(-math.exp(rounded))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_a_tail_that_rounds_to_zero_keeps_losses_and_gradients_finite() -> None:
    """The teacher's candidates have all of its float32 mass; the student's have 1 − 1e-20 of its mass."""
    teacher = torch.log(torch.tensor([[0.75, 0.25 + 1e-6]]))
    assert math.isfinite(float(teacher_log_tail(teacher)))
    logits = torch.tensor([[50.0, 49.0, 0.0, -1.0]], requires_grad=True)
    inputs = LossInputs(
        torch.tensor([0]), torch.ones(1), teacher_ids_NK=torch.tensor([[0, 1]]), teacher_logprobs_NK=teacher
    )
    for kind in DIVERGENCES:
        logits.grad = None
        output = Objective(kind)(StudentLogits(logits), inputs)
        output.loss.backward()
        assert math.isfinite(float(output.loss)) and bool(torch.isfinite(logits.grad).all()), kind
    tail = torch.tensor([-200.0, float("-inf"), -3.0], requires_grad=True)
    floored = floor_log_tail(tail)
    floored.sum().backward()
    assert floored.tolist() == [-60.0, -60.0, -3.0]
    assert tail.grad[0] == 1.0 and tail.grad[2] == 1.0


def test_forward_kl_has_its_full_gradient_for_a_student_with_almost_no_mass_on_candidates() -> None:
    """Its probability of the candidates is about e^-30; a clamp would hide the gradient."""
    logits = torch.full((1, 50), 30.0)
    logits[0, :2] = 0.0
    logits.requires_grad_()
    teacher = torch.log(torch.tensor([[0.6, 0.3]]))
    inputs = LossInputs(
        torch.tensor([0]), torch.ones(1), teacher_ids_NK=torch.tensor([[0, 1]]), teacher_logprobs_NK=teacher
    )
    Objective("forward_kl")(StudentLogits(logits), inputs).loss.backward()
    torch.testing.assert_close(logits.grad[0, :2], torch.tensor([-0.6, -0.3]), rtol=1e-4, atol=1e-6)
