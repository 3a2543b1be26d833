"""Model FLOPs against PyTorch's own counter."""

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from understudy.trainers.metrics import model_flops


def small(tied: bool) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def counted(model: Qwen3ForCausalLM, tokens: int) -> float:
    """FLOPs of forward and backward over rows of one token, for which attention scores cost next to nothing."""
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(tokens, 1, dtype=torch.int64)).logits.sum().backward()
    return float(counter.get_total_flops())


def test_model_flops_match_pytorchs_flop_counter() -> None:
    for tied in (False, True):
        model = small(tied)
        expected = counted(model, 64)
        assert 0.97 < model_flops(model, 64) / expected < 1.05, tied


def test_model_flops_of_frozen_weights_exclude_their_gradient() -> None:
    model = small(False)
    whole = model_flops(model, 10)
    model.requires_grad_(False)
    assert model_flops(model, 10) == whole * 4 / 6
