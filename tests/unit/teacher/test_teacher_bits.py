"""Replicas with eight-bit weights: their scores are those of the rounded weights, and the change is measured."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from understudy.config import parse_recipe
from understudy.errors import ConfigError, TeacherError
from understudy.planning.models.folder import ModelFolder
from understudy.teacher.protocol import ScoreReply, ScoreRequest, request_of
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.quantize import Bits, Fp8Linear, Int8Linear, _to_fp8, quantized
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.types.scores import ScoreItem, Signal

ROW = np.array([3, 9, 27, 14, 5, 40, 22, 8, 17, 30], np.int32)


@torch.no_grad()
def plain(model: torch.nn.Module, row: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(row.astype(np.int64))[None]
    return model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize("layout", [ScoringLayout.PADDED, ScoringLayout.PACKED, ScoringLayout.AUTO])
def test_scores_are_those_of_a_plain_model_with_rounded_weights(qwen3: Path, layout: ScoringLayout) -> None:
    frozen = load_frozen(str(qwen3))
    twin = copy.deepcopy(frozen.model)
    small, error = quantized(frozen, Bits.INT8, "cpu", 0.05)
    rounded = 0
    for name, module in twin.named_modules():
        if type(module) is not torch.nn.Linear or "lm_head" in name:
            continue
        found = small.model.get_submodule(name)
        assert isinstance(found, Int8Linear) and found.weight.dtype == torch.int8
        near = found.weight.float() * found.scale[:, None]
        # To the nearest of 255 steps: at most half a step off.
        assert ((near - module.weight).abs() <= 0.501 * found.scale[:, None]).all()
        module.weight.data.copy_(near)
        rounded += module.weight.numel()
    assert rounded == ModelFolder.open(str(qwen3), "model").linear_parameters
    scorer = Scorer("t", small, ScorerOptions(layout=layout))
    scorer.warm_up()
    items = [
        ScoreItem(f"row-{n}", ROW[:n], np.arange(1, n, dtype=np.int32), Signal.SAMPLED) for n in (10, 6, 3)
    ]
    for item, scores in zip(items, scorer.score(request_of(items)).split(), strict=True):
        right = plain(twin, item.tokens)[np.arange(item.length - 1), item.tokens[1:]]
        np.testing.assert_allclose(scores.sampled_logprobs, right, atol=1e-5)
    assert 0 < error.kl < error.worst and 0 < error.mean <= error.worst < 0.2


def test_a_model_that_changes_too_much_is_refused(qwen3: Path) -> None:
    with pytest.raises(TeacherError, match=r"by more than quantize_tolerance = 1e-12: KL .* nats"):
        quantized(load_frozen(str(qwen3)), Bits.INT8, "cpu", 1e-12)


@pytest.mark.gpu
def test_fp8_products_are_near_those_of_the_rounded_numbers() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    small = Fp8Linear(linear).cuda()
    states = torch.randn(2, 7, 64, dtype=torch.bfloat16, device="cuda")
    weight = small.weight.float() * small.scale.t()
    wide, scale = _to_fp8(states.flatten(0, 1))
    right = (wide.float() * scale) @ weight.t() + linear.bias.float().cuda()
    torch.testing.assert_close(small(states).flatten(0, 1).float(), right, rtol=2e-2, atol=2e-2)


def test_fp8_weights_keep_three_bits_of_mantissa() -> None:
    torch.manual_seed(0)
    values = torch.randn(16, 64) * torch.logspace(-3, 3, 16)[:, None]
    small, scale = _to_fp8(values)
    near = small.float() * scale
    large = values.abs() > scale * 2**-6  # normal numbers of float8
    assert ((near - values).abs() <= values.abs() / 16 + 1e-12)[large].all()


@pytest.mark.parametrize(("rounding", "accepted"), [(0.0, False), (2.0, True)])
def test_compiled_layers_may_differ_by_the_rounding_of_fp8(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, rounding: float, accepted: bool
) -> None:
    frozen = replace(load_frozen(str(qwen3)), rounding=rounding)
    scorer = Scorer("t", frozen, ScorerOptions(compile_layers=True))

    def compile_layers() -> None:
        """Stands for a compiler whose results differ slightly."""
        plain_score = scorer.score

        def differing(request: ScoreRequest) -> ScoreReply:
            found = plain_score(request)
            found.sampled_P[:] += 0.5
            return found

        monkeypatch.setattr(scorer, "score", differing)

    monkeypatch.setattr(scorer.body, "compile_layers", compile_layers)
    if accepted:
        scorer.warm_up()
    else:
        with pytest.raises(TeacherError, match=r"differ from the model's own forward by 0\.5"):
            scorer.warm_up()


def test_fp8_needs_a_gpu_that_multiplies_in_it(qwen3: Path) -> None:
    with pytest.raises(TeacherError, match=r"needs a GPU with fp8 products .* use 'int8'"):
        quantized(load_frozen(str(qwen3)), Bits.FP8, "cpu", 0.05)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel = 2 is set"),
        ({"model": "student", "version": "live"}, "version = 'live' is set"),
        ({"placement": "external", "urls": ["http://h:1"]}, "`quantize` belongs to processes that this run starts"),
    ],
)  # fmt: skip
def test_where_it_cannot_be(keys: dict, said: str) -> None:
    teacher = {"model": "m", "quantize": "int8", **keys}
    with pytest.raises(ConfigError, match=said):
        parse_recipe({"student": {"model": "s"}, "teachers": {"t": teacher}, "data": {"train": "d.jsonl"}})
