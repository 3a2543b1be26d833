"""A teacher with another tokenizer than the quickstart's student: other ids, pairs of characters, another chat template."""

import json
from itertools import product
from pathlib import Path

import torch
from other_tokenizers import byte_level
from transformers import Qwen3Config, Qwen3ForCausalLM

PAIRS = ["".join(pair) for pair in product("0123456789", repeat=2)] + ["abc", "de", "gh", "no", "tu", "xy"]
SPECIAL = ("<|stop|>", "<|turn|>", "<|pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + ': ' + message['content'] + '<|stop|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant: ' }}{% endif %}"
)


def write_other_teacher(folder: Path, seed: int = 3) -> str:
    """Random weights suffice: tests compare its scores with a plain forward pass of the same model."""
    tokenizer = byte_level(PAIRS, SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|stop|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    torch.manual_seed(seed)
    shape = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
        tie_word_embeddings=True, initializer_range=0.4, eos_token_id=tokenizer.token_to_id("<|stop|>"),
    )  # fmt: skip
    model = Qwen3ForCausalLM(shape)
    model.generation_config.eos_token_id = shape.eos_token_id
    model.save_pretrained(folder)
    return str(folder)
