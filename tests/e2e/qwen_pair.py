"""A base student and an instruct teacher in the shape of Qwen2.5's files: padded heads, another eos, another template.

Weights are random and tiny, the vocabulary is made up. `base = 151_643` gives the real sizes; tests mostly take fewer.
"""

import json
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM = "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"


def write_tokenizer(
    folder: Path, base: int, added: tuple[str, ...], eos: str, template: str, **more: Any
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a, b in product(alphabet, alphabet)]
    triples = ((a + b, c) for (a, b), c in product(pairs, alphabet))
    merges = list(islice((*pairs, *islice(triples, max(base, 1))), base - len(alphabet)))
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": eos, "pad_token": "<|endoftext|>"}
    config |= {"unk_token": None, "bos_token": None, "chat_template": template, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    *,
    rows: int,
    eos: str,
    ends: list[int] | int,
    base: int = 256,
    added: tuple[str, ...] = ADDED,
    template: str = CHATML,
    seed: int = 0,
) -> str:
    write_tokenizer(folder, base, added, eos, template)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=rows, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.4,
        eos_token_id=base, bos_token_id=base,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    return str(folder)


def write_pair(
    folder: Path, base: int = 256, rows: tuple[int, int] = (288, 320), more: tuple[str, ...] = ()
) -> tuple[str, str]:
    """(student, teacher): a base model and an instruct one; `more` are tokens that only the teacher has."""
    eos = [base + ADDED.index("<|im_end|>"), base]
    student = write_model(folder / "base", rows=rows[0], eos="<|endoftext|>", ends=base, base=base)
    teacher = write_model(
        folder / "instruct",
        rows=rows[1],
        eos="<|im_end|>",
        ends=eos,
        base=base,
        added=(*ADDED, *more),
        template=SYSTEM + CHATML,
        seed=1,
    )
    return student, teacher


def write_questions(path: Path, count: int = 16) -> str:
    rows = [{"messages": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
