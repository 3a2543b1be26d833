"""Tokenizer, image processor and models of the shapes recipe: a Qwen3-VL of a third of a million parameters.

    <user><|vision_start|><|image_pad|> x 9<|vision_end|>how many shapes ?<assistant>two<eos>

One token per word. A picture of 48 x 48 pixels has 36 patches of 8 x 8, and 9 tokens.
"""

from pathlib import Path

import torch
from supervise import VisionChat
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from shapes import COLOURS, CORNERS, COUNTS, QUESTIONS, SIDE
from understudy.media.processor import PictureProcessor

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIALS = (PAD, EOS, UNK, "<user>", "<assistant>", START, END, IMAGE, VIDEO)
SPOKEN = (*QUESTIONS, *COLOURS, *CORNERS.values(), *COUNTS)
WORDS = sorted({word for text in SPOKEN for word in text.split()})
CONTEXT = 64
PATCH, MERGED = 8, 2
HIDDEN = 64
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {word: index for index, word in enumerate([*SPECIALS, *WORDS])}
    backend = Tokenizer(WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[one for one in SPECIALS if one not in (PAD, EOS, UNK)],
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(layers: int, seed: int) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL with a vision tower of two layers; `layers` are those of its language part."""
    torch.manual_seed(seed)
    ids = build_tokenizer().convert_tokens_to_ids
    text = {
        "vocab_size": len(SPECIALS) + len(WORDS),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": HIDDEN // 4,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": ids(PAD),
        "bos_token_id": None,
        "eos_token_id": ids(EOS),
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "spatial_merge_size": MERGED,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=ids(IMAGE),
        video_token_id=ids(VIDEO),
        vision_start_token_id=ids(START),
        vision_end_token_id=ids(END),
    )
    return Qwen3VLForConditionalGeneration(config)


def chat_of(model: Qwen3VLForConditionalGeneration) -> VisionChat:
    tokenizer = build_tokenizer()
    return VisionChat(tokenizer, PictureProcessor.of(model.config, image_processor(), tokenizer))


def save_model(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """A folder as `from_pretrained` reads it, with tokenizer and image processor."""
    tokenizer = build_tokenizer()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor().save_pretrained(folder)


def image_processor() -> Qwen2VLImageProcessorPil:
    bounds = {"shortest_edge": (PATCH * MERGED) ** 2, "longest_edge": 64 * 64}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, temporal_patch_size=1, merge_size=MERGED, size=bounds)
