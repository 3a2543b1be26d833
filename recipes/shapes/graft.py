"""Grafts a language model behind a small vision tower: a SmolVLM whose language part has the given weights.

    <|im_start|>user
    <fake_token_around_image><global-img><image> x 9<fake_token_around_image>how many shapes ?<|im_end|>
    <|im_start|>assistant
    two<|im_end|>

A picture of 48 x 48 pixels has 36 patches of 8 x 8, and 9 tokens. Tower and projection are new; layers, embeddings and
head are the language model's, with rows for three more tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from supervise import VisionChat
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)

from shapes import SIDE
from understudy.media.processor import PictureProcessor

IMAGE = "<image>"
ADDED = (IMAGE, "<fake_token_around_image>", "<global-img>")
PATCH, MERGED = 8, 2
TOWER = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 3}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(language: Path) -> Any:
    """The language model's, with the tokens that stand around and for pictures, and a template for parts."""
    tokenizer = AutoTokenizer.from_pretrained(language)
    tokenizer.add_special_tokens({"additional_special_tokens": list(ADDED)})
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def image_processor() -> SmolVLMImageProcessorPil:
    """One tile for a picture."""
    size = {"longest_edge": SIDE}
    return SmolVLMImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)


def evenly(layers: int, kept: int) -> list[int]:
    """`kept` of the layers, with the first and the last."""
    return [round(index * (layers - 1) / max(1, kept - 1)) for index in range(kept)]


def graft(language: Path, seed: int, kept: Sequence[int] | None = None) -> SmolVLMForConditionalGeneration:
    """`kept`: layers of the language model that stay; None: all."""
    source = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    tokenizer = build_tokenizer(language)
    stay = list(kept) if kept is not None else list(range(source.config.num_hidden_layers))
    text = {**source.config.to_dict(), "num_hidden_layers": len(stay), "vocab_size": len(tokenizer)}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text.pop("layer_types", None)
    config = SmolVLMConfig(
        text_config=text,
        vision_config={**TOWER, "image_size": SIDE, "patch_size": PATCH},
        scale_factor=MERGED,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=source.config.tie_word_embeddings,
    )
    torch.manual_seed(seed)
    model = SmolVLMForConditionalGeneration(config)
    with torch.no_grad():
        for own, given in (
            (model.model.text_model.embed_tokens, source.model.embed_tokens),
            (model.lm_head, source.lm_head),
        ):
            known = min(len(given.weight), len(own.weight))
            own.weight[:known] = given.weight[:known]
            own.weight[known:] = given.weight.mean(0)
    model.model.text_model.norm.load_state_dict(source.model.norm.state_dict())
    for new, old in enumerate(stay):
        model.model.text_model.layers[new].load_state_dict(source.model.layers[old].state_dict())
    return model


def copy_tower(source: SmolVLMForConditionalGeneration, target: SmolVLMForConditionalGeneration) -> None:
    """Vision tower and projection of one model for another."""
    target.model.vision_model.load_state_dict(source.model.vision_model.state_dict())
    target.model.connector.load_state_dict(source.model.connector.state_dict())


def chat_of(model: SmolVLMForConditionalGeneration, language: Path) -> VisionChat:
    tokenizer = build_tokenizer(language)
    return VisionChat(tokenizer, PictureProcessor.of(model.config, image_processor(), tokenizer))


def save_model(model: SmolVLMForConditionalGeneration, chat: VisionChat, folder: Path) -> None:
    """A folder as `from_pretrained` reads it, with tokenizer and image processor."""
    eos, pad = chat.tokenizer.eos_token_id, chat.tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(folder)
    chat.tokenizer.save_pretrained(folder)
    image_processor().save_pretrained(folder)
