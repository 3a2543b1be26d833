"""The CPU's own forward pass compared with transformers', prompt by prompt and token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import SHAPE, VOCAB, make_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from understudy.engines.local import kv_padded as kv
from understudy.nn.cpu_forward import CpuForward, cpu_forward
from understudy.nn.prefix_tree import prefix_tree

LONGEST = 40


def qwen2() -> Any:
    """With biases on queries, keys and values, which the others lack."""
    torch.manual_seed(3)
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def llama3() -> Any:
    """With biases in every product, and scaled rotary positions."""
    torch.manual_seed(4)
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=rope)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: make_model("qwen3"),
    "llama": lambda: make_model("llama"),
    "qwen2": qwen2,
    "llama3": llama3,
}


def some_rows(equal: bool) -> list[np.ndarray]:
    """Nine rows, of which several have a common prefix and two are equal."""
    rng = np.random.default_rng(5)
    beginnings = [rng.integers(0, VOCAB, 4) for _ in range(3)]
    tails = [rng.integers(0, VOCAB, 5 if equal else int(rng.integers(1, 9))) for _ in range(8)]
    rows = [np.concatenate([beginnings[i % 3], tail]) for i, tail in enumerate(tails)]
    return [*rows, rows[2].copy()]


@torch.inference_mode()
def by_cpu_forward(model: Any, rows: list[np.ndarray], steps: np.ndarray) -> list[torch.Tensor]:
    """Logits [B, V] after the prompts and after each step's tokens."""
    fast = cpu_forward(model, LONGEST)
    assert isinstance(fast, CpuForward), "this model is supported"
    lengths_B = np.array([len(row) for row in rows])
    width = int(lengths_B.max())
    filling_BT = np.arange(LONGEST) < (width - lengths_B)[:, None]
    additive_mask_BT = None
    if filling_BT.any():
        additive_mask_BT = torch.zeros(filling_BT.shape, dtype=model.dtype)
        additive_mask_BT.masked_fill_(torch.from_numpy(filling_BT), -torch.inf)
    cache = kv.new_cache(model.config.num_hidden_layers, width, most=LONGEST)
    logits = [fast.prompts(prefix_tree(rows), lengths_B, additive_mask_BT, cache)]
    for n, tokens_B in enumerate(steps):
        positions_B = torch.from_numpy(lengths_B + n)
        logits.append(fast.step(torch.from_numpy(tokens_B), positions_B, additive_mask_BT, cache))
    return logits


@pytest.mark.parametrize("equal", [True, False], ids=["one length", "many lengths"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_prompts_and_steps_equal_transformers(name: str, equal: bool) -> None:
    model, rows = MODELS[name](), some_rows(equal)
    steps = np.random.default_rng(6).integers(0, VOCAB, (7, len(rows)))
    found = by_cpu_forward(model, rows, steps)
    for i, row in enumerate(rows):
        ids = torch.from_numpy(np.concatenate([row, steps[:, i]]))[None]
        with torch.no_grad():
            expected_TV = model(input_ids=ids).logits[0, len(row) - 1 :]
        for n, logits_BV in enumerate(found):
            scale = max(1.0, float(expected_TV[n].abs().max()))
            assert (logits_BV[i] - expected_TV[n]).abs().max() <= 1e-5 * scale


def test_bfloat16_logits_are_close_to_transformers() -> None:
    model, rows = make_model("qwen3").to(torch.bfloat16), some_rows(equal=True)
    (found_BV,) = by_cpu_forward(model, rows, np.zeros((0, len(rows)), dtype=np.int64))
    with torch.no_grad():
        expected_BV = model(input_ids=torch.from_numpy(np.stack(rows))).logits[:, -1]
    assert found_BV.dtype is torch.bfloat16
    assert (found_BV.float() - expected_BV.float()).abs().max() <= 0.02 * expected_BV.abs().max()


def test_a_batch_repeats_bit_for_bit_and_equal_rows_get_nearly_equal_logits() -> None:
    model, rows = make_model("qwen3"), some_rows(equal=False)
    steps = np.random.default_rng(6).integers(0, VOCAB, (5, len(rows)))
    steps[:, 8] = steps[:, 2]
    first, second = by_cpu_forward(model, rows, steps), by_cpu_forward(model, rows, steps)
    for one_BV, other_BV in zip(first, second, strict=True):
        assert torch.equal(one_BV, other_BV)
    # Not to the bit: MKL on AVX-512 sums the rows at the end of a tile in another order.
    torch.testing.assert_close(first[0][2], first[0][8], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_of_whole_rows_equal_transformers(name: str) -> None:
    model, rows = MODELS[name](), some_rows(equal=False)
    tree, fast = prefix_tree(rows), cpu_forward(model, LONGEST)
    assert fast is not None
    wanted = [(i, t) for i, row in enumerate(rows) for t in range(i % 3, len(row))]
    nodes_P = torch.tensor([int(tree.nodes_BL[i, t]) for i, t in wanted])
    with torch.inference_mode():
        found_PF = fast.states(tree, nodes_P)
        plain = [model.model(input_ids=torch.from_numpy(row)[None]).last_hidden_state[0] for row in rows]
    expected_PF = torch.stack([plain[i][t] for i, t in wanted])
    assert (found_PF - expected_PF).abs().max() <= 2e-5 * max(1.0, float(expected_PF.abs().max()))


def with_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, answer: answer * 2)


def with_own_forward(model: Any) -> None:
    model.forward = lambda *given, **options: None


def with_adapter(model: Any) -> None:
    class Adapter(nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj = Adapter(32, 48, bias=False)


def with_eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def with_windows(model: Any) -> None:
    model.config.layer_types = ["full_attention", "sliding_attention"]


def with_dynamic_rope(model: Any) -> None:
    model.config.rope_parameters["rope_type"] = "dynamic"


@pytest.mark.parametrize(
    "change",
    [with_hook, with_own_forward, with_adapter, with_eager_attention, with_windows, with_dynamic_rope],
)
def test_a_modified_model_gets_no_cpu_forward(change: Callable[[Any], None]) -> None:
    model = make_model("qwen3")
    assert cpu_forward(model, LONGEST) is not None
    change(model)
    assert cpu_forward(model, LONGEST) is None


def test_an_unknown_architecture_gets_no_cpu_forward() -> None:
    assert cpu_forward(make_model("gemma3"), LONGEST) is None
