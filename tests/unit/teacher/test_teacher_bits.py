"""Replicas with eight-bit weights: scores equal those of the rounded weights, and the error is measured."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from teacher_rig import VOCAB, write_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from understudy.config import parse_recipe
from understudy.errors import ConfigError, TeacherError
from understudy.planning.models.folder import ModelFolder
from understudy.planning.processes import PROCESS_BYTES, plan_processes
from understudy.planning.seating import seat
from understudy.teacher.protocol import ScoreReply, ScoreRequest, request_of
from understudy.teacher.scoring import eight_bits
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.eight_bits import Bits, Fp8Linear, Int8Embedding, Int8Head, Int8Linear, to_fp8
from understudy.teacher.scoring.head import from_wire
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.quantize import quantized
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.scores import ScoreItem, Signal

ROW = np.array([3, 9, 27, 14, 5, 40, 22, 8, 17, 30], np.int32)


@torch.no_grad()
def plain(model: torch.nn.Module, row: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(row.astype(np.int64))[None]
    return model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings whose embedding layer scales the rows it looks up."""
    folder = write_model(tmp_path_factory.mktemp("models") / "gemma")  # only its tokenizer is kept
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma3TextConfig(
        **shape,
        vocab_size=VOCAB,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def with_rounded_weights(twin: torch.nn.Module, small: torch.nn.Module) -> int:
    """Copies the dequantized weights of `small` into `twin` and returns how many weights were rounded."""
    rounded = 0
    for name, module in twin.named_modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            continue
        found = small.get_submodule(name)
        assert isinstance(found, Int8Linear | Int8Embedding | Int8Head) and found.weight.dtype == torch.int8
        near = found.weight.float() * found.scale[:, None]
        if name == "lm_head" and twin.config.tie_word_embeddings:
            assert found.weight.data_ptr() == small.get_input_embeddings().weight.data_ptr()
            continue
        # To the nearest of 255 steps: at most half a step off.
        assert ((near - module.weight).abs() <= 0.501 * found.scale[:, None]).all()
        module.weight.data.copy_(near)
        rounded += module.weight.numel()
    return rounded


@pytest.mark.parametrize("family", ["llama", "tied", "gemma"])
@pytest.mark.parametrize("layout", [ScoringLayout.PADDED, ScoringLayout.PACKED, ScoringLayout.AUTO])
def test_int8_scores_equal_those_of_a_plain_model_with_the_rounded_weights(
    family: str,
    layout: ScoringLayout,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(request.getfixturevalue(family))
    frozen = load_frozen(path)
    # Widens the head in parts of 64 vocabulary rows.
    monkeypatch.setattr(eight_bits, "_WIDENED_BYTES", 4 * 64 * frozen.config.hidden_size)
    twin = copy.deepcopy(frozen.model)
    small, error = quantized(frozen, Bits.INT8, "cpu", 0.05)
    assert with_rounded_weights(twin, small.model) == ModelFolder.open(path, "model").quantized_parameters
    scorer = Scorer("t", small, ScorerOptions(layout=layout))
    warm_up(scorer)
    items = [
        ScoreItem(f"row-{n}", ROW[:n], np.arange(1, n, dtype=np.int32), Signal.SAMPLED) for n in (10, 6, 3)
    ]
    for item, scores in zip(items, scorer.score(request_of(items)).split(), strict=True):
        right = plain(twin, item.tokens)[np.arange(item.length - 1), item.tokens[1:]]
        np.testing.assert_allclose(scores.sampled_logprobs, right, atol=1e-5)
    assert 0 < error.kl < error.worst and 0 < error.mean <= error.worst < 0.5
    # The head sent to a trainer (`signal = "hidden"`) has the same weights.
    sent = from_wire(scorer.wire_head)
    assert torch.equal(sent.weight_VH, twin.get_output_embeddings().weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_int8_head_is_widened_in_parts_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 1000)
    head = Int8Head.of(linear)
    whole = head.weight.float() * head.scale[:, None]
    states = torch.randn(3, 5, 16).to(dtype)
    widened: list[int] = []
    plain_product = eight_bits.wide_product

    def watched(hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
        widened.append(weight.numel() * weight.element_size())
        plain_product(hidden, weight, logits)

    monkeypatch.setattr(eight_bits, "wide_product", watched)
    monkeypatch.setattr(eight_bits, "_WIDENED_BYTES", 1 << 14)
    found = head(states)
    assert len(widened) > 1 and max(widened) <= 1 << 14
    right = states.float() @ whole.to(dtype).float().T + linear.bias.detach()
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), right, atol=near, rtol=near)


def test_int8_products_with_large_float16_activations_do_not_overflow() -> None:
    """A float16 ends at 65,504: 127 times an activation of 600 is beyond it, the product with the weight is not."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 16).half()
    states = torch.full((3, 32), 600.0, dtype=torch.float16)
    small = Int8Linear(linear)
    near = small.weight.float() * small.scale.float()[:, None]
    expected = states.float() @ near.T + linear.bias.float()
    torch.testing.assert_close(small(states).float(), expected, rtol=2e-3, atol=1.0)


def test_quantization_beyond_quantize_tolerance_is_refused(qwen3: Path) -> None:
    with pytest.raises(TeacherError, match=r"by more than quantize_tolerance = 1e-12: KL .* nats"):
        quantized(load_frozen(str(qwen3)), Bits.INT8, "cpu", 1e-12)


@pytest.mark.gpu
def test_fp8_products_are_close_to_products_of_the_rounded_numbers() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    small = Fp8Linear(linear).cuda()
    states = torch.randn(2, 7, 64, dtype=torch.bfloat16, device="cuda")
    weight = small.weight.float() * small.scale.t()
    wide, scale = to_fp8(states.flatten(0, 1))
    right = (wide.float() * scale) @ weight.t() + linear.bias.float().cuda()
    torch.testing.assert_close(small(states).flatten(0, 1).float(), right, rtol=2e-2, atol=2e-2)


def test_fp8_rounding_keeps_three_mantissa_bits_of_normal_numbers() -> None:
    torch.manual_seed(0)
    values = torch.randn(16, 64) * torch.logspace(-3, 3, 16)[:, None]
    small, scale = to_fp8(values)
    near = small.float() * scale
    large = values.abs() > scale * 2**-6  # normal numbers of float8
    assert ((near - values).abs() <= values.abs() / 16 + 1e-12)[large].all()


@pytest.mark.parametrize(("rounding", "accepted"), [(0.0, False), (2.0, True)])
def test_warm_up_accepts_compiled_scores_that_differ_by_fp8_rounding_only(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, rounding: float, accepted: bool
) -> None:
    frozen = replace(load_frozen(str(qwen3)), rounding=rounding)
    scorer = Scorer("t", frozen, ScorerOptions(compile_layers=True))

    def compile_layers() -> None:
        """Stands for a compiler whose results differ from the eager ones."""
        plain_score = scorer.score

        def differing(request: ScoreRequest) -> ScoreReply:
            found = plain_score(request)
            found.sampled_P[:] += 0.5
            return found

        monkeypatch.setattr(scorer, "score", differing)

    monkeypatch.setattr(scorer.body, "compile_layers", compile_layers)
    if accepted:
        warm_up(scorer)
    else:
        with pytest.raises(TeacherError, match=r"differ from the model's own forward by 0\.5"):
            warm_up(scorer)


def test_fp8_is_refused_without_a_gpu_that_has_fp8_products(qwen3: Path) -> None:
    with pytest.raises(TeacherError, match=r"needs a GPU with fp8 products .* use 'int8'"):
        quantized(load_frozen(str(qwen3)), Bits.FP8, "cpu", 0.05)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel = 2 is set"),
        ({"model": "student", "version": "live"}, "version = 'live' is set"),
        ({"model": "student", "version": "start", "placement": "trainer"}, "placement = 'trainer' is set"),
        ({"placement": "external", "urls": ["http://h:1"]}, "`quantize` belongs to processes that this run starts"),
    ],
)  # fmt: skip
def test_quantize_is_refused_together_with_settings_that_exclude_it(keys: dict, message: str) -> None:
    teacher = {"model": "m", "quantize": "int8", **keys}
    with pytest.raises(ConfigError, match=message):
        parse_recipe({"student": {"model": "s"}, "teachers": {"t": teacher}, "data": {"train": "d.jsonl"}})


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_the_plan_counts_the_bytes_of_an_int8_replica(family: str, request: pytest.FixtureRequest) -> None:
    path = str(request.getfixturevalue(family))
    small, _ = quantized(load_frozen(path), Bits.INT8, "cpu", 0.05)
    tensors = [*small.model.parameters(), *small.model.buffers()]
    held = sum({one.data_ptr(): one.nbytes for one in tensors}.values())
    teacher = {"model": path, "quantize": "int8"}
    recipe = parse_recipe(
        {"student": {"model": path}, "teachers": {"t": teacher}, "data": {"train": "d.jsonl"}}
    )
    planned = next(one for one in plan_processes(recipe, seat(recipe, 0)) if one.name == "teacher-t-0")
    assert planned.bytes is not None
    scales = sum(one.nbytes for name, one in small.model.named_buffers() if name.endswith("scale"))
    rotary = sum(one.nbytes for name, one in small.model.named_buffers() if "inv_freq" in name)
    assert planned.bytes - PROCESS_BYTES == held - scales - rotary
