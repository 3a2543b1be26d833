"""Random models in Qwen3's shapes for the rollout benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM

CONTEXT = 1024
VOCAB = 151_936
SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {
        "vocab_size": VOCAB,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1.7b": {
        "vocab_size": VOCAB,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "vocab_size": VOCAB,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def config_of(shape: dict[str, int]) -> Qwen3Config:
    return Qwen3Config(
        **shape, max_position_embeddings=4096, tie_word_embeddings=shape["hidden_size"] < 4096, pad_token_id=0
    )


def build_model(shape: dict[str, int], device: str, dtype: torch.dtype) -> Any:
    """Built on the device in its own precision: 8B parameters in float32 on a host would take a minute."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config_of(shape))
    finally:
        torch.set_default_dtype(before)


def write_model(
    folder: Path, shape: dict[str, int], device: str, dtype: torch.dtype, *, config_only: bool = False
) -> None:
    """A folder vLLM can start from, with an unused tokenizer. Large shapes get only a config: their server
    makes up its weights."""
    folder.mkdir(parents=True)
    words = {f"t{i}": i for i in range(32)}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config_only or shape["hidden_size"] >= 4096:
        config = config_of(shape)
        config.architectures = ["Qwen3ForCausalLM"]
        config.dtype = dtype
        config.save_pretrained(folder)
        return
    build_model(shape, device, dtype).save_pretrained(folder)
