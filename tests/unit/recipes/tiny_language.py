"""A tiny Llama with a tokenizer of the shapes task's words, in a folder that looks like SmolLM2's."""

import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = [
    "user",
    "assistant",
    "how",
    "many",
    "shapes",
    "?",
    "what",
    "colour",
    "is",
    "the",
    "circle",
    "square",
    "triangle",
    "where",
    "one",
    "two",
    "three",
    "four",
    "red",
    "green",
    "blue",
    "yellow",
    "top",
    "bottom",
    "left",
    "right",
]


def make_language(folder: Path, layers: int = 3, hidden: int = 48) -> Path:
    tokens = [*SPECIALS, "\n", " ", *WORDS, *(" " + word for word in WORDS)]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(tokens)}, unk_token=SPECIALS[0]))
    inner.pre_tokenizer = Split(Regex(r"\n| ?[^\s]+"), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        additional_special_tokens=list(SPECIALS),
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make_language(Path(sys.argv[1]))
