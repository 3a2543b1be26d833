"""Attention windows longer than every probe: packed rows only for models that pass their window to attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import _MOE, CONTEXT, FAMILIES, VOCAB, Family, make
from plain_figures import gradient_error, rows_of, score_error

from understudy.errors import PolicyError, TeacherError
from understudy.nn.short_windows import SHORT, short_windows
from understudy.policy.forward.forward import choose_layout, keeps_rows_apart
from understudy.policy.microbatch import Layout
from understudy.policy.policy import Policy
from understudy.policy.step import PolicySettings
from understudy.teacher.scoring.body import ScoringLayout

torch.set_num_threads(1)

WINDOW = 30
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_SWITCHED_ON = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}
_CHUNKS = {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]}
PASSED_TO_ATTENTION = {
    "mistral": Family("mistral", {"sliding_window": WINDOW}),
    "phi3": Family("phi3", {"pad_token_id": 0, "sliding_window": WINDOW}),
    "gemma3": Family("gemma3_text", {"head_dim": 8, **_TWO_KINDS}),
    "qwen3": Family("qwen3", {"head_dim": 8, **_SWITCHED_ON}),
    "qwen3-moe": Family("qwen3_moe", {"head_dim": 8, "decoder_sparse_step": 1, **_MOE, **_SWITCHED_ON}),
    "qwen2-moe": Family(
        "qwen2_moe",  # its windows are off, as in its checkpoints
        {
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 24,
            **_MOE,
            "sliding_window": WINDOW,
        },
    ),
}
ONLY_IN_THE_MASK = {
    "phimoe": Family("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen2-moe": Family("qwen2_moe", {**PASSED_TO_ATTENTION["qwen2-moe"].options, **_SWITCHED_ON}),
}
LLAMA4 = Family(
    "llama4_text",
    {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
        **_CHUNKS,
    },
)


def make_family(family: Family, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(FAMILIES, "windowed", family)
    return make("windowed")


def rows_beyond_the_window() -> list[Any]:
    rows = rows_of((50, 60, 45, 9), VOCAB, shared=36)
    assert max(map(len, rows)) < CONTEXT
    return rows


@pytest.mark.parametrize("name", PASSED_TO_ATTENTION)
def test_models_that_pass_their_window_to_attention_are_packed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(PASSED_TO_ATTENTION[name], monkeypatch)
    rows = rows_beyond_the_window()
    assert keeps_rows_apart(model) and choose_layout(model) is Layout.PACKED
    assert gradient_error(model, rows) < 1e-5
    assert score_error(model, rows, ScoringLayout.PACKED) < 2e-5


@pytest.mark.parametrize("name", ONLY_IN_THE_MASK)
def test_models_whose_window_is_only_in_the_mask_are_not_packed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(ONLY_IN_THE_MASK[name], monkeypatch)
    rows = rows_beyond_the_window()
    assert choose_layout(model) is Layout.PADDED
    with pytest.raises(PolicyError, match="cannot train on packed rows"):
        choose_layout(model, Layout.PACKED)
    assert model.config.sliding_window == WINDOW and model.config._attn_implementation == "sdpa"
    assert score_error(model, rows) < 2e-5
    with pytest.raises(TeacherError, match="its attention windows are in the mask alone"):
        score_error(model, rows, ScoringLayout.PACKED)


def test_llama_4_works_as_a_teacher_over_padded_rows_and_is_refused_as_a_student(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its base model is the model itself, and its mask restricts attention to chunks."""
    model = make_family(LLAMA4, monkeypatch)
    rows = rows_beyond_the_window()
    assert score_error(model, rows) < 2e-5
    with pytest.raises(TeacherError, match="its attention windows are in the mask alone"):
        score_error(model, rows, ScoringLayout.PACKED)
    with pytest.raises(PolicyError, match="does not say which part of it is the body"):
        Policy(model, PolicySettings())


def test_short_windows_shortens_windows_of_config_and_layers_and_restores_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_family(PASSED_TO_ATTENTION["gemma3"], monkeypatch)
    layers = [layer.self_attn for layer in model.model.layers]
    with pytest.raises(RuntimeError, match="stop"), short_windows(model) as windowed:
        assert windowed and model.config.sliding_window == SHORT
        assert [layer.sliding_window for layer in layers] == [SHORT, None]
        raise RuntimeError("stop")
    assert model.config.sliding_window == WINDOW
    assert [layer.sliding_window for layer in layers] == [WINDOW, None]
    with short_windows(make("qwen3")) as windowed:
        assert not windowed
