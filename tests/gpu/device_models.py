"""A student and a teacher for runs that take a second: head size 64, grouped queries, tied embeddings, a thousand words."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 1000
STOPS = list(range(60))
"""Many ids end an answer, so that rows of one batch end at different steps."""
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "eos_token_id": STOPS,
    "pad_token_id": 1,
    "bos_token_id": None,
}
FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def save_model(folder: Path, family: str, layers: int, seed: int) -> Path:
    config, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config(**SHAPE, num_hidden_layers=layers))
    model.generation_config.eos_token_id = STOPS
    model.save_pretrained(folder)
    inner = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w2"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="w0", pad_token="w1", unk_token="w2", model_max_length=2048
    )
    tokenizer.save_pretrained(folder)
    return folder


def save_prompts(path: Path, between: tuple[int, int], rows: int = 24) -> Path:
    """Writes prompts whose numbers of words lie between the two bounds."""
    fewest, most = between
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(rows):
        length = int(torch.randint(fewest, most + 1, (1,), generator=generator))
        ids = torch.randint(100, VOCAB, (length,), generator=generator).tolist()
        lines.append(json.dumps({"prompt": " ".join(f"w{one}" for one in ids)}) + "\n")
    path.write_text("".join(lines))
    return path
