"""Attention windows in decoding over slots, where no mask is passed: each layer sees what transformers' mask
shows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import _MOE, FAMILIES, Family, make
from own_code import ASSETS, write_house_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from understudy.engines.local.kernels import attention as decode_attention
from understudy.engines.local.kernels import decode_step, fused
from understudy.engines.local.slots import MODEL_TYPES, SlotPool, pool_fits
from understudy.nn.pretrained import load_causal_lm

torch.set_num_threads(1)

WINDOW, LENGTH = 6, 14
_MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_SWITCHED: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}
_HEADS = {"head_dim": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
VISIBLE_TOKENS: dict[str, tuple[Family, list[int]]] = {
    "llama": (Family("llama", {**_HEADS, "sliding_window": WINDOW}), [LENGTH, LENGTH]),  # it has no window
    "mistral": (Family("mistral", {**_HEADS, "sliding_window": WINDOW}), [WINDOW, WINDOW]),
    "mistral-off": (Family("mistral", {**_HEADS, "sliding_window": None}), [LENGTH, LENGTH]),
    "qwen2": (Family("qwen2", {**_HEADS, **_SWITCHED}), [LENGTH, WINDOW]),
    "qwen2-types": (Family("qwen2", {**_HEADS, **_SWITCHED, **_MIXED}), [WINDOW, LENGTH]),
    "qwen2-off": (Family("qwen2", {**_HEADS, "sliding_window": WINDOW}), [LENGTH, LENGTH]),
    "qwen3": (Family("qwen3", {**_HEADS, **_SWITCHED}), [LENGTH, WINDOW]),
    "qwen3-types": (Family("qwen3", {**_HEADS, **_SWITCHED, **_MIXED}), [WINDOW, LENGTH]),
    "qwen3-off": (Family("qwen3", {**_HEADS, "sliding_window": WINDOW}), [LENGTH, LENGTH]),
}
"""By model: how many tokens the last of `LENGTH` tokens sees in each layer. All that are decoded over slots."""
DECODED_WITH_MASKS = {
    "gemma2": Family("gemma2", {**_HEADS, **_MIXED}),
    "gemma3": Family("gemma3_text", {**_HEADS, **_MIXED}),
    "cohere2": Family("cohere2", {**_HEADS, **_MIXED}),
    "exaone4": Family("exaone4", {**_HEADS, **_MIXED}),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW}),
    "phi3": Family("phi3", {"sliding_window": WINDOW}),
    "phimoe": Family("phimoe", {**_EXPERTS, "sliding_window": WINDOW}),
    "mixtral": Family("mixtral", {**_EXPERTS, "sliding_window": WINDOW}),
    "gpt-oss": Family("gpt_oss", {**_HEADS, **_EXPERTS, **_MIXED}),
    "olmo3": Family("olmo3", _MIXED),
    "ministral": Family("ministral", {**_HEADS, **_MIXED}),
    "smollm3": Family(
        "smollm3",
        {**_MIXED, "use_sliding_window": True, "no_rope_layers": [1, 0]},
    ),
    "qwen2-moe": Family(
        "qwen2_moe",
        {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 24, **_MOE, **_SWITCHED},
    ),
    "qwen3-moe": Family("qwen3_moe", {**_HEADS, "decoder_sparse_step": 1, **_MOE, **_SWITCHED}),
}
"""Models with windows that are decoded over padded rows, under transformers' own masks."""

interpreted = pytest.mark.skipif(
    fused.triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="run by tests/contract/test_interpreted_kernels.py",
)


def make_family(family: Family, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(FAMILIES, "windowed", family)
    return make("windowed")


def visible_to_the_last(model: Any) -> list[tuple[int, int]]:
    """For each layer: how many tokens its mask shows the last token, and how many its `sliding_window` does."""
    found = []

    def record(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[Any, None]:
        shown = int((attention_mask[0, 0, -1] == 0).sum())
        found.append((shown, min(LENGTH, int(options.get("sliding_window") or LENGTH))))
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, 1).transpose(1, 2), None

    AttentionInterface.register("recorder", record)
    AttentionMaskInterface.register("recorder", eager_mask)
    before, model.config._attn_implementation = model.config._attn_implementation, "recorder"
    with torch.inference_mode():
        model(input_ids=torch.arange(LENGTH)[None] + 3)
    model.config._attn_implementation = before
    return found


@pytest.mark.parametrize("name", VISIBLE_TOKENS)
def test_the_window_of_every_layer_is_that_of_transformers_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, expected = VISIBLE_TOKENS[name]
    model = make_family(family, monkeypatch)
    assert model.config.model_type in MODEL_TYPES
    assert visible_to_the_last(model) == [(count, count) for count in expected]
    if decode_step.fits(model):
        windows = [decode_step._Layer(layer).window for layer in model.model.layers]
        assert [min(LENGTH, window or LENGTH) for window in windows] == expected
    known = [type(layer).__name__ in decode_step.LAYERS for layer in model.model.layers]
    assert all(known) is not name.startswith("mistral"), "Mistral's layers pass their window to `attend`"


@pytest.mark.parametrize("name", DECODED_WITH_MASKS)
def test_other_models_with_windows_are_not_decoded_over_slots(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(DECODED_WITH_MASKS[name], monkeypatch)
    assert any(shown == WINDOW for shown, _ in visible_to_the_last(model))
    assert not pool_fits(model) and model.config.model_type not in MODEL_TYPES
    assert not decode_step.fits(model)


def test_every_model_that_is_decoded_over_slots_is_in_the_table() -> None:
    assert {family.kind for family, _ in VISIBLE_TOKENS.values()} == MODEL_TYPES


IDS = np.arange(LENGTH) + 3


def logits_over_slots(model: Any, *, loop: bool, read: int) -> torch.Tensor:
    """Logits after every token from the `read`-th on; the loop reads the first `read` tokens as a prompt."""
    pool = SlotPool(model, slots=2, max_length=LENGTH, device=torch.device("cpu"))
    pool._loop = decode_step.DecodeLoop(model) if loop else None
    (slot,), found = pool.take(1), []
    places = pool.scratch_places(1)
    places.slots_B.fill_(slot)
    with torch.inference_mode():
        if read:
            found.append(pool.read([slot], [IDS[:read]])[0])
        for place in range(read, LENGTH):
            places.lengths_B.fill_(place)
            found.append(pool.forward(torch.tensor([IDS[place]]), places)[0].clone())
    return torch.stack(found)


def check_logits(model: Any, found: torch.Tensor) -> None:
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(IDS)[None]).logits[0, -len(found) :]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", VISIBLE_TOKENS)
def test_decoding_past_the_window_equals_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family(VISIBLE_TOKENS[name][0], monkeypatch)
    check_logits(model, logits_over_slots(model, loop=False, read=0))


@interpreted
@pytest.mark.parametrize("name", [name for name in VISIBLE_TOKENS if not name.startswith("mistral")])
def test_the_decode_loop_past_the_window_equals_transformers_in_triton_s_interpreter(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(VISIBLE_TOKENS[name][0], monkeypatch)
    check_logits(model, logits_over_slots(model, loop=True, read=9))


def test_a_model_with_code_of_its_own_is_not_decoded_over_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its classes may be named like those of transformers, and define their window only in the config."""
    folder = write_house_model(tmp_path / "house")
    for file in ("modeling_house.py", "config.json"):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace('"house"', '"qwen3"'))
    monkeypatch.setattr(decode_attention, "kernel_fits", lambda *shapes: True)
    own = load_causal_lm(str(folder), dtype=torch.float32, trust_remote_code=True)
    assert own.config.model_type == "qwen3" and type(own).__name__ == "HouseForCausalLM"
    assert not pool_fits(own)
    assert pool_fits(load_causal_lm(str(ASSETS / "models" / "student"), dtype=torch.float32))
