"""The Triton kernels, run by Triton's interpreter on the CPU (and compiled, where there is a GPU).

Triton decides when a kernel is defined whether it will be interpreted, so these cases need TRITON_INTERPRET=1 before
anything imports it: tests/contract/test_interpreted_kernels.py runs this file in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from losses_cases import DIVERGENCES, assert_close, gradients, make_case

from understudy.losses.objective import Objective
from understudy.losses.plain import head_logits
from understudy.types.loss import StudentLogits, metric_results

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and HAS_TRITON
GPU = torch.cuda.is_available() and HAS_TRITON and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or GPU), reason="run by tests/contract/test_interpreted_kernels.py"
)

OBJECTIVES = [
    *((kind, signal, "bucket") for kind in DIVERGENCES for signal in ("topk", "hidden")),
    *((kind, "topk", tail) for kind in DIVERGENCES for tail in ("renormalise", "drop")),
    *((kind, "sampled", "bucket") for kind in ("k2", "k3+", "abs")),
    ("reverse_kl", "at_ids", "bucket"),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of 32, a vocabulary of 61 takes two blocks, the second incomplete, and the interpreter stays
    quick."""
    if INTERPRETED:
        from understudy.losses.fused import triton_rows

        for settings in (
            triton_rows.EXPONENTIATE,
            triton_rows.FULL_SUMMARY,
            triton_rows.FULL_SUMMARY_TWICE,
            triton_rows.FULL_GRADIENT,
        ):
            monkeypatch.setitem(settings, "BLOCK", 32)
            if "WIDTH" in settings:
                monkeypatch.setitem(settings, "WIDTH", 16)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(not GPU)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # numpy warns about lanes that are masked out afterwards
        yield
    torch.use_deterministic_algorithms(False)


def check_equal_to_reference(
    objective: Objective, dtype: torch.dtype, tolerance: float, **shape: object
) -> None:
    case = make_case(seed=9, dtype=dtype, **{"tokens": 3, **shape})
    expected, expected_gradients = case.reference(objective, dtype)
    student = case.student(dtype)
    if GPU:
        leaves = [
            None if t is None else t.detach().cuda().requires_grad_()
            for t in (student.hidden_NH, student.weight_VH, student.bias_V)
        ]
        student = type(student)(*leaves, student.softcap, student.logit_scale, student.temperature)
    output = objective(student, case.inputs.to(DEVICE) if not GPU else _on_gpu(case.inputs))
    output.loss.backward()
    assert_close(output.loss.cpu(), expected.loss, tolerance)
    assert_close(output.per_token_N.cpu(), expected.per_token_N, tolerance)
    for found, wanted in zip(gradients(student), expected_gradients, strict=True):
        assert_close(found.cpu(), wanted, tolerance)
    found_metrics, wanted_metrics = metric_results(output.metrics), metric_results(expected.metrics)
    assert found_metrics.keys() == wanted_metrics.keys()
    for name, value in wanted_metrics.items():
        assert found_metrics[name] == pytest.approx(value, rel=10 * tolerance, abs=tolerance), name


def _on_gpu(inputs: object) -> object:
    moved = inputs.to("cuda")
    head = inputs.teacher_head
    object.__setattr__(
        moved,
        "teacher_head",
        type(head)(head.weight_VH.cuda(), None, head.softcap, head.logit_scale, head.temperature),
    )
    return moved


@runs_kernels
@pytest.mark.parametrize(("kind", "signal", "tail"), OBJECTIVES)
def test_kernels_equal_the_fp64_reference_in_float32(kind: str, signal: str, tail: str) -> None:
    check_equal_to_reference(
        Objective(kind, signal, tail, backend="triton", chunk_bytes=61 * 4 * 4), torch.float32, 1e-5
    )


@runs_kernels
@pytest.mark.parametrize(("kind", "signal", "tail"), OBJECTIVES[::4])
def test_kernels_equal_the_fp64_reference_in_bfloat16(kind: str, signal: str, tail: str) -> None:
    objective = Objective(kind, signal, tail, backend="triton", chunk_bytes=61 * 2 * 8)
    check_equal_to_reference(objective, torch.bfloat16, 1e-2, spread=1.0, tokens=6)


@runs_kernels
@pytest.mark.parametrize("signal", ["topk", "hidden", "sampled"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_kernels_with_softcap_scale_and_temperature_equal_the_fp64_reference(
    signal: str, softcap: float | None
) -> None:
    objective = Objective("k2" if signal == "sampled" else "jsd", signal, backend="triton")
    check_equal_to_reference(
        objective, torch.float32, 1e-5, softcap=softcap, logit_scale=0.6, temperature=1.3
    )


@runs_kernels
def test_kernels_with_a_task_loss_and_a_clamp_equal_the_fp64_reference() -> None:
    shared = {"task_coef": 0.7, "per_token_clamp": 0.5, "tis_cap": 1.5, "backend": "triton"}
    check_equal_to_reference(Objective("forward_kl", **shared), torch.float32, 1e-5)
    check_equal_to_reference(Objective("forward_kl", "hidden", **shared), torch.float32, 1e-5)


@runs_kernels
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_kernels_with_verls_clamps_equal_the_fp64_reference(kind: str) -> None:
    """A candidate at the floor of the student's log-probability has no gradient; nor has a sum below zero or above the
    limit."""
    shared = {"tail": "drop", "log_prob_min_clamp": -2.5, "clamp_at_zero": True, "backend": "triton"}
    check_equal_to_reference(Objective(kind, **shared), torch.float32, 1e-5, tokens=6)
    check_equal_to_reference(Objective(kind, **shared, loss_max_clamp=0.3), torch.float32, 1e-5, tokens=6)


@runs_kernels
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_kernels_equal_the_fp64_reference_at_both_ends_of_the_jsd_family(beta: float) -> None:
    check_equal_to_reference(Objective("jsd", "hidden", beta=beta, backend="triton"), torch.float32, 1e-5)


@runs_kernels
@pytest.mark.parametrize("candidates", [1, 33, 61])
def test_kernels_take_any_number_of_candidates_up_to_the_vocabulary(candidates: int) -> None:
    check_equal_to_reference(
        Objective("forward_kl", backend="triton"), torch.float32, 1e-5, candidates=candidates, tokens=3
    )


@runs_kernels
@pytest.mark.parametrize("signal", ["topk", "hidden"])
def test_kernels_rescale_a_row_whose_later_logits_are_far_larger(signal: str) -> None:
    """Logits of later blocks exceed earlier ones by a hundred, so the sums so far must be scaled down, or they
    overflow."""
    case = make_case(seed=6, tokens=6, dtype=torch.float32)
    case.bias = case.bias + torch.arange(61).double() * 2.0
    low = torch.arange(case.inputs.teacher_ids_NK.shape[1]).expand_as(case.inputs.teacher_ids_NK).contiguous()
    object.__setattr__(case.inputs, "teacher_ids_NK", low)
    object.__setattr__(case.inputs, "token_ids_N", low[:, 0].contiguous())
    objective = Objective("forward_kl", signal, backend="triton")
    expected, expected_gradients = case.reference(objective, torch.float32)
    student = case.student(torch.float32)
    output = objective(student, case.inputs)
    output.loss.backward()
    assert_close(output.loss, expected.loss, 1e-5)
    assert_close(student.weight_VH.grad, expected_gradients[1], 1e-4)


@runs_kernels
def test_masked_rows_give_exact_zeros() -> None:
    case = make_case(seed=1, tokens=6, dtype=torch.float32)
    inputs = case.inputs._map(lambda tensor: tensor)
    weights = inputs.weights_N.clone()
    weights[::2] = 0.0
    object.__setattr__(inputs, "weights_N", weights)
    student = case.student(torch.float32)
    Objective("forward_kl", backend="triton")(student, inputs).loss.backward()
    assert float(student.hidden_NH.grad[::2].abs().max()) == 0.0
    assert float(student.hidden_NH.grad[1::2].abs().max(-1).values.min()) > 0.0
    assert bool(torch.isfinite(student.weight_VH.grad).all())


@runs_kernels
def test_kernels_scale_gradients_by_a_factor_on_the_loss_and_work_under_no_grad() -> None:
    case = make_case(seed=1, tokens=6, dtype=torch.float32)
    objective = Objective("forward_kl", backend="triton")
    plain, scaled = case.student(torch.float32), case.student(torch.float32)
    objective(plain, case.inputs).loss.backward()
    (0.25 * objective(scaled, case.inputs).loss).backward()
    for found, wanted in zip(gradients(scaled), gradients(plain), strict=True):
        torch.testing.assert_close(found, 0.25 * wanted)
    with torch.no_grad():
        value = objective(case.student(torch.float32), case.inputs).loss
    assert not value.requires_grad
    assert_close(value, case.reference(objective, torch.float32)[0].loss, 1e-5)


@runs_kernels
def test_kernels_and_plain_train_to_the_same_curve() -> None:
    case = make_case(seed=3, tokens=4, dtype=torch.float32)
    objective = Objective("forward_kl", backend="triton")
    fused, plain = case.student(torch.float32), case.student(torch.float32)
    curves: list[list[float]] = [[], []]
    for _ in range(5):
        for curve, student, as_logits in ((curves[0], fused, False), (curves[1], plain, True)):
            view = StudentLogits(head_logits(student.hidden_NH, student)) if as_logits else student
            output = objective(view, case.inputs)
            output.loss.backward()
            curve.append(output.loss.item())
            with torch.no_grad():
                for leaf in (student.hidden_NH, student.weight_VH, student.bias_V):
                    leaf -= 0.1 * leaf.grad
                    leaf.grad = None
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
