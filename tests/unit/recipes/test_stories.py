"""Model and tokenizer files of llama2.c are converted into equivalent ones for transformers."""

import struct
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[3] / "recipes" / "other-tokenizer"))
from make_stories import HELD_OUT, TRAIN, build_tokenizer, halves, openings, pieces, read_model

SHAPE = LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders rows of transformers' weights into rotary pairs, as llama2.c's export script does."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def packed(model: LlamaForCausalLM) -> bytes:
    shape, weights = model.config, {name: one.detach() for name, one in model.named_parameters()}
    found = [weights["model.embed_tokens.weight"]]
    for part in (
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj",
    ):  # fmt: skip
        for layer in range(shape.num_hidden_layers):
            one = weights[f"model.layers.{layer}.{part}.weight"]
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
            found.append(one if heads is None else neighbours(one, heads))
    found += [weights["model.norm.weight"], torch.zeros(2 * 16 * 4)]
    head = struct.pack("<7i", 32, 48, 2, 4, 2, 300, 16)
    return head + b"".join(one.numpy().tobytes() for one in found)


def test_a_model_read_from_a_llama2_c_file_gives_the_logits_of_the_original() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    data = packed(model)
    found, size = read_model(memoryview(data + b"rest"))
    assert size == len(data)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


def test_halves_moves_rotary_pairs_to_the_two_halves_of_each_head() -> None:
    rows = torch.arange(8.0)[:, None]
    assert halves(rows, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("text", ["the cat", "the  cat\nsat", "café ☃"])
def test_the_tokenizer_merges_by_score_and_writes_other_characters_as_bytes(text: str) -> None:
    names = [
        "<unk>",
        "\n<s>\n",
        "\n</s>\n",
        *map(chr, range(256)),
        *" thecas",
        "th",
        " th",
        " the",
        "at",
        " c",
        " cat",
    ]
    scores = [0.0] * 266 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    data = b"".join(
        struct.pack("<fi", score, len(name.encode())) + name.encode()
        for name, score in zip(names, scores, strict=True)
    )
    found = list(pieces(memoryview(struct.pack("<i", 8) + data)))
    assert [name for name, _ in found] == names
    tokenizer = build_tokenizer(found, context=16)
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == tokenizer.eos_token_id == 1
    assert tokenizer.decode(ids[1:]) == text
    if text == "the cat":
        assert tokenizer.convert_ids_to_tokens(ids[1:]) == ["\u2581the", "\u2581cat"]


def test_held_out_openings_share_no_name_animal_or_place_with_those_for_training() -> None:
    assert not any(set(TRAIN[key]) & set(HELD_OUT[key]) for key in TRAIN)
    for words in (TRAIN, HELD_OUT):
        found = openings(words)
        assert len(found) == len(set(found)) and openings(words) == found
