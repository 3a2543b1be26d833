"""Tiny random models of many families, as transformers builds them: two layers, 48 tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, CONTEXT = 48, 96
LARGER = 6.0
"""Random weights are multiplied by this, so that logits differ enough between tokens."""
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Family:
    """`kind` is transformers' model_type; `options` go into its config beside the shape above."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    refused_by_hf: str = ""
    """A part of the hf engine's refusal; empty where it generates."""


_RECURRENT = "(linear_attention layers|mamba layers|a recurrent state)"
"""Of Mamba's layers, by the release of transformers."""


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}

FAMILIES: dict[str, Family] = {
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", {"head_dim": 8}),
    "qwen3-moe": Family("qwen3_moe", {"head_dim": 8, "decoder_sparse_step": 1, **_MOE}),
    "qwen2-moe": Family(
        "qwen2_moe", {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 24, **_MOE}
    ),
    "llama": Family("llama"),
    "llama3-rope": Family(
        "llama",
        _rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=24,
        ),
    ),
    "llama-yarn": Family("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=24)),
    "llama-linear": Family("llama", _rope("linear", factor=2.0)),
    "llama-dynamic": Family("llama", _rope("dynamic", factor=2.0)),
    "mistral-window": Family("mistral", {"sliding_window": 6}),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gemma": Family("gemma", {"head_dim": 8}),
    "gemma2": Family(
        "gemma2",
        {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0},
    ),
    "gemma3": Family("gemma3_text", {"head_dim": 8, **_TWO_KINDS}),
    "phi3": Family("phi3", {"pad_token_id": 0}),
    "phi": Family("phi"),
    "gpt2": Family("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "gpt-neox": Family("gpt_neox"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", _TWO_KINDS),
    "olmoe": Family("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": Family("cohere"),
    "cohere2": Family("cohere2", _TWO_KINDS),
    "granite": Family(
        "granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
    ),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0]}),
    "glm4": Family("glm4", {"head_dim": 8}),
    "starcoder2": Family("starcoder2", {"sliding_window": None}),
    "stablelm": Family("stablelm"),
    "nemotron": Family("nemotron"),
    "exaone4": Family("exaone4", _TWO_KINDS),
    "seed-oss": Family("seed_oss", {"head_dim": 8}),
    "ernie4.5": Family("ernie4_5", {"head_dim": 8}),
    "deepseek-v3": Family(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_TWO_KINDS},
    ),
    "lfm2": Family(
        "lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, "conv layers"
    ),
    "qwen3-next": Family(
        "qwen3_next",
        {
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 24,
            **_MOE,
        },
        "linear_attention layers",
    ),
    "mamba": Family("mamba", {"state_size": 4}, _RECURRENT),
    "mamba2": Family(
        "mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2}, "linear_attention layers"
    ),
}


def make(name: str, seed: int = 0) -> Any:
    """The model as `from_pretrained` would return it, with transformers' choice of attention."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family.kind, **{**_SHAPE, **family.options})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(LARGER)
            elif parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
