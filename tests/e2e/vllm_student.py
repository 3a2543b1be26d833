"""A student with random weights, of a size that vLLM can serve on a CPU."""

import shutil
from pathlib import Path

import torch
from small_runs import ASSETS
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM


def write_student(folder: Path, seed: int = 3) -> str:
    """The quickstart's vocabulary on a random model whose head size vLLM's CPU kernels have."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "models" / "student")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / "models" / "student" / name, folder / name)
    return str(folder)
