"""The fused paths equal the plain path: values, gradients, edge cases, and the curve they train to.

Uninitialised memory is filled with NaN throughout, so an output that no kernel wrote cannot pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from losses_cases import DIVERGENCES, assert_close, gradients, make_case

from understudy.errors import LossInputError
from understudy.losses.objective import Objective
from understudy.losses.plain import head_logits
from understudy.types.loss import LossInputs, StudentHead, StudentLogits, metric_results

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

OBJECTIVES = [
    *(Objective(kind, signal, chunk_bytes=5_000) for kind in DIVERGENCES for signal in ("topk", "hidden")),
    *(
        Objective(kind, tail=tail, chunk_bytes=5_000)
        for kind in DIVERGENCES
        for tail in ("renormalise", "drop")
    ),
    *(Objective(kind, "sampled", chunk_bytes=5_000) for kind in ("k2", "k3", "k3+", "abs")),
    Objective("reverse_kl", "at_ids"),
    Objective("k1", "sampled", policy_gradient=True, tis_cap=2.0, dual_clip=3.0),
    Objective("forward_kl", task_coef=0.7, per_token_clamp=0.5),
    Objective("jsd", "hidden", task_coef=0.7, tis_cap=1.5),
    Objective("jsd", "hidden", beta=0.0),
    Objective("skew_reverse_kl", "hidden", alpha=0.0),
    Objective("k2", "sampled", distill_coef=0.0, task_coef=1.0),
]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def name_of(objective: Objective) -> str:
    return f"{objective.kind}-{objective.signal}-{objective.tail}-{objective.task_coef:g}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_the_chunked_torch_path_equals_the_fp64_reference(objective: Objective, dtype: torch.dtype) -> None:
    case = make_case(seed=11, spread=2.0 if dtype == torch.float32 else 1.0, dtype=dtype)
    expected, expected_gradients = case.reference(objective, dtype)
    student = case.student(dtype)
    output = objective(student, case.inputs)
    output.loss.backward()
    tolerance = TOLERANCE[dtype]
    if dtype == torch.bfloat16 and (objective.kind == "tvd" or objective.tail == "drop"):
        tolerance *= (
            4  # a sign decided by rounding (tvd) or a sum that crosses zero (drop): few tokens, large shares
        )
    assert_close(output.loss, expected.loss, tolerance)
    assert_close(output.per_token_N, expected.per_token_N, tolerance)
    for found, wanted in zip(gradients(student), expected_gradients, strict=True):
        assert_close(found, wanted, tolerance)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(("logit_scale", "temperature"), [(1.0, 1.0), (0.6, 1.3)])
@pytest.mark.parametrize(
    ("kind", "signal"), [("forward_kl", "topk"), ("reverse_kl", "hidden"), ("k2", "sampled")]
)
@pytest.mark.parametrize("bias", [True, False])
def test_softcap_logit_scale_temperature_and_bias_equal_the_fp64_reference(
    kind: str, signal: str, softcap: float | None, logit_scale: float, temperature: float, bias: bool
) -> None:
    objective = Objective(kind, signal, chunk_bytes=4_000)
    case = make_case(
        seed=5,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        bias=bias,
        dtype=torch.float32,
    )
    expected, expected_gradients = case.reference(objective, torch.float32)
    student = case.student(torch.float32)
    output = objective(student, case.inputs)
    output.loss.backward()
    assert_close(output.loss, expected.loss, 1e-5)
    for found, wanted in zip(gradients(student), expected_gradients, strict=True):
        assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_gradients_for_random_shapes_equal_the_fp64_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, width, vocab = (int(torch.randint(1, high, (1,), generator=generator)) for high in (40, 20, 130))
    candidates = int(torch.randint(1, vocab + 1, (1,), generator=generator))
    objective = Objective(
        DIVERGENCES[seed % 7], chunk_bytes=1 + int(torch.randint(20_000, (1,), generator=generator))
    )
    case = make_case(seed, tokens, width, vocab, candidates, dtype=torch.float32)
    _, expected_gradients = case.reference(objective, torch.float32)
    student = case.student(torch.float32)
    objective(student, case.inputs).loss.backward()
    for found, wanted in zip(gradients(student), expected_gradients, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=2e-5 * float(wanted.abs().max()))


def test_teacher_head_may_be_longer_or_shorter_than_the_students() -> None:
    for padding in (7, -7):
        case = make_case(seed=2, teacher_padding=padding, dtype=torch.float32)
        inputs = case.inputs
        object.__setattr__(inputs, "token_ids_N", inputs.token_ids_N % 40)
        object.__setattr__(inputs, "_max_id", 39)
        objective = Objective("forward_kl", "hidden")
        expected, expected_gradients = case.reference(objective, torch.float32)
        student = case.student(torch.float32)
        output = objective(student, inputs)
        output.loss.backward()
        assert_close(output.loss, expected.loss, 1e-5)
        assert_close(student.weight_VH.grad, expected_gradients[1], 1e-5)
        if padding < 0:
            assert float(student.weight_VH.grad[padding:].abs().max()) == 0.0


def test_a_factor_on_the_loss_scales_the_gradients_and_a_second_backward_raises() -> None:
    case = make_case(seed=1, dtype=torch.float32)
    plain, scaled = case.student(torch.float32), case.student(torch.float32)
    objective = Objective("forward_kl")
    objective(plain, case.inputs).loss.backward()
    loss = objective(scaled, case.inputs).loss
    (3.0 * loss).backward(retain_graph=True)
    for found, wanted in zip(gradients(scaled), gradients(plain), strict=True):
        torch.testing.assert_close(found, 3.0 * wanted)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


def test_frozen_parts_of_a_head_get_no_gradient_and_others_the_same_one() -> None:
    case = make_case(seed=1, dtype=torch.float32)
    objective = Objective("reverse_kl", "hidden")
    free, frozen = case.student(torch.float32), case.student(torch.float32)
    frozen.weight_VH.requires_grad_(False)
    frozen.bias_V.requires_grad_(False)
    objective(free, case.inputs).loss.backward()
    objective(frozen, case.inputs).loss.backward()
    torch.testing.assert_close(frozen.hidden_NH.grad, free.hidden_NH.grad)
    assert frozen.weight_VH.grad is None and frozen.bias_V.grad is None


def test_without_gradients_the_value_is_the_same_and_has_no_graph() -> None:
    case = make_case(seed=1, dtype=torch.float32)
    objective = Objective("forward_kl", task_coef=0.3)
    with_graph = objective(case.student(torch.float32), case.inputs)
    with torch.no_grad():
        without = objective(case.student(torch.float32), case.inputs)
    assert not without.loss.requires_grad
    torch.testing.assert_close(without.loss, with_graph.loss.detach())
    assert metric_results(without.metrics) == metric_results(with_graph.metrics)


def test_a_tied_embedding_gets_the_gradients_of_hidden_states_and_head() -> None:
    case = make_case(seed=1, bias=False, dtype=torch.float32)
    embedding = case.weight.float().requires_grad_()
    twin = case.weight.float().requires_grad_()
    rows = torch.arange(case.inputs.num_tokens)
    objective = Objective("forward_kl")
    objective(StudentHead(embedding[rows], embedding), case.inputs).loss.backward()
    objective(StudentLogits(twin[rows] @ twin.t()), case.inputs).loss.backward()
    assert_close(embedding.grad, twin.grad, 1e-5)


@pytest.mark.parametrize(("kind", "signal"), [("forward_kl", "topk"), ("jsd", "hidden"), ("k2", "sampled")])
def test_no_tokens_or_no_weight_gives_a_finite_zero_with_zero_gradients(kind: str, signal: str) -> None:
    objective = Objective(kind, signal, task_coef=0.5)
    whole = make_case(seed=1, dtype=torch.float32)
    masked = whole.inputs._map(lambda tensor: tensor)
    object.__setattr__(masked, "weights_N", torch.zeros_like(masked.weights_N))
    empty = make_case(seed=1, dtype=torch.float32)
    empty.hidden = empty.hidden[:0]
    for case, inputs in ((whole, masked), (empty, whole.inputs.rows(0, 0))):
        student = case.student(torch.float32)
        output = objective(student, inputs)
        output.loss.backward()
        assert output.loss.item() == 0.0
        assert all(float(gradient.abs().sum()) == 0.0 for gradient in gradients(student))
        assert all(abs(value) != float("inf") for value in metric_results(output.metrics).values())


def test_fused_and_plain_train_to_the_same_curve() -> None:
    case = make_case(seed=3, tokens=16, dtype=torch.float32)
    objective = Objective("forward_kl", chunk_bytes=4_000)
    fused, plain = case.student(torch.float32), case.student(torch.float32)
    curves: list[list[float]] = [[], []]
    for _ in range(30):
        for curve, student, as_logits in ((curves[0], fused, False), (curves[1], plain, True)):
            view = StudentLogits(head_logits(student.hidden_NH, student)) if as_logits else student
            output = objective(view, case.inputs)
            output.loss.backward()
            curve.append(output.loss.item())
            with torch.no_grad():
                for leaf in (student.hidden_NH, student.weight_VH, student.bias_V):
                    leaf -= 0.05 * leaf.grad
                    leaf.grad = None
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert curves[0][-1] < 0.5 * curves[0][0]


def test_autocast_around_the_objective_changes_no_bit() -> None:
    case = make_case(seed=4, dtype=torch.float32)
    plain, inside = case.student(torch.float32), case.student(torch.float32)
    objective = Objective("forward_kl")
    objective(plain, case.inputs).loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = objective(inside, case.inputs).loss
    loss.backward()
    for found, wanted in zip(gradients(inside), gradients(plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_logits_of_extreme_size_stay_finite() -> None:
    case = make_case(seed=4, dtype=torch.float32)
    case.hidden = case.hidden * 200
    for objective in (Objective("forward_kl"), Objective("reverse_kl"), Objective("jsd", "hidden")):
        student = case.student(torch.float32)
        output = objective(student, case.inputs)
        output.loss.backward()
        assert bool(torch.isfinite(output.loss)) and all(
            bool(torch.isfinite(g).all()) for g in gradients(student)
        )


def test_triton_is_refused_where_it_cannot_run() -> None:
    from understudy.losses.fused.backends import TRITON_INTERPRETED

    if TRITON_INTERPRETED:
        pytest.skip("interpreted kernels run anywhere")
    case = make_case(seed=1, dtype=torch.float32)
    with pytest.raises(LossInputError, match="backend = 'triton' cannot run here"):
        Objective("forward_kl", backend="triton")(case.student(torch.float32), case.inputs)
    with pytest.raises(LossInputError, match="unknown backend"):
        Objective("forward_kl", backend="cuda")(case.student(torch.float32), case.inputs)


def test_loss_inputs_are_moved_and_sliced_together() -> None:
    inputs = make_case(seed=1, dtype=torch.float32).inputs
    part = inputs.to("cpu").rows(3, 9)
    assert isinstance(part, LossInputs) and part.num_tokens == 6 and part.max_id == inputs.max_id
    torch.testing.assert_close(part.teacher_ids_NK, inputs.teacher_ids_NK[3:9])
