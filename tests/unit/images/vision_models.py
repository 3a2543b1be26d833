"""Tiny random vision-language models with tokenizer, chat template and image processor, made in a folder."""

from __future__ import annotations

import io
import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Idefics3ImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

from understudy.media.processor import PictureProcessor, PictureReader
from understudy.media.store import MediaStore

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
LARGER = 6.0
"""Random weights are multiplied by this, so that logits differ enough between tokens."""
CONTEXT = 512
TILE_TOKENS = 4
"""Of SmolVLM and Idefics3."""
_LETTERS = [chr(code) for code in range(33, 127)]
_SPECIAL = [
    "<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)),
]  # fmt: skip
_QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IDEFICS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, space and newline, and the special tokens of both families."""
    tokens = [*_SPECIAL, "\n", " ", *_LETTERS]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(tokens)}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    qwen = family.startswith("qwen")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>" if qwen else "<end_of_utterance>",
        additional_special_tokens=_SPECIAL,
        chat_template=_QWEN_TEMPLATE if qwen else _IDEFICS_TEMPLATE,
    )


def config_of(
    family: str, layers: int = 2, hidden: int = 32, heads: tuple[int, int] = (4, 2), **options: Any
) -> Any:
    """`heads`: of queries, of keys and values."""
    tokenizer = tokenizer_of(family)
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids(
            "<|image_pad|>" if family.startswith("qwen") else "<image>"
        )
    }
    if not family.startswith("qwen"):
        text |= {"model_type": "llama"}
        vision = {
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        vision |= {"image_size": 32, "patch_size": 8}
        return AutoConfig.for_model(
            family, text_config=text, vision_config=vision, scale_factor=2, tie_word_embeddings=False,
            pad_token_id=0, **ids, **options,
        )  # fmt: skip
    size = hidden // heads[0]
    text |= {"head_dim": size, "tie_word_embeddings": False}
    sections = [size // 4, size // 8, size // 8]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    ids |= {
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    if family == "qwen2_5_vl":
        vision = {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": hidden,
        }
        vision |= {"patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1]}
    else:
        text["rope_parameters"]["mrope_interleaved"] = True
        vision = {
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": hidden,
        }
        vision |= {"patch_size": 8, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=False, **ids, **options
    )


def image_processor_of(family: str, **options: Any) -> Any:
    if family.startswith("qwen"):
        given = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
        return Qwen2VLImageProcessorPil(**{**given, **options})
    made = SmolVLMImageProcessorPil if family == "smolvlm" else Idefics3ImageProcessorPil
    given = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    return made(**{**given, **options})


def make_model(
    folder: Path,
    family: str,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    image_options: Any = None,
    heads: tuple[int, int] = (4, 2),
) -> Path:
    """A folder as `save_pretrained` leaves it."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config_of(family, layers, hidden, heads))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(LARGER if "embed" not in name else 3.0)
    tokenizer = tokenizer_of(family)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor_of(family, **(image_options or {})).save_pretrained(folder)
    if not family.startswith("qwen"):  # tokens of a tile, which transformers' own processors read here
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": TILE_TOKENS}))
    config = json.loads((folder / "preprocessor_config.json").read_text())
    assert config["image_processor_type"]
    return folder


def picture(colour: Any, size: tuple[int, int] = (40, 24), dot: tuple[int, int] | None = None) -> bytes:
    """A PNG of one colour, with a white dot."""
    image = Image.new("RGB", size, colour)
    if dot is not None:
        image.paste((255, 255, 255), (dot[0], dot[1], dot[0] + 6, dot[1] + 6))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


@lru_cache(maxsize=1)
def _root() -> Path:
    return Path(tempfile.mkdtemp(prefix="vision-models-"))


@lru_cache(maxsize=64)
def folder_of(family: str, seed: int = 0, layers: int = 2, hidden: int = 32) -> Path:
    """The same model for all tests of a process."""
    return make_model(_root() / f"{family}-{seed}-{layers}-{hidden}", family, seed, layers, hidden)


def reader_of(folder: Path, store: MediaStore) -> PictureReader:
    processor = PictureProcessor.load(str(folder))
    assert processor is not None
    return PictureReader(processor, store)


def plain_inputs(folder: Path, ids: np.ndarray, pictures: list[bytes]) -> dict[str, torch.Tensor]:
    """The inputs that transformers' processor gives for one row, without our code."""
    tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
    if not pictures:
        return {"input_ids": tokens}
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    opened = [Image.open(io.BytesIO(data)) for data in pictures]
    qwen = "Qwen" in type(images).__name__
    made = images(images=opened if qwen else [opened], return_tensors="pt")
    if qwen:
        image_id = json.loads((folder / "config.json").read_text())["image_token_id"]
        return {"input_ids": tokens, **made, "mm_token_type_ids": (tokens == image_id).int()}
    return {
        "input_ids": tokens,
        "pixel_values": made["pixel_values"],
        "pixel_attention_mask": made["pixel_attention_mask"],
    }


def plain_logprobs(model: Any, folder: Path, ids: np.ndarray, pictures: list[bytes]) -> torch.Tensor:
    """float32 [T - 1]: log p of every token but the first, by the model's own forward of this row alone."""
    model.base_model.rope_deltas = None
    logits = model(**plain_inputs(folder, ids, pictures), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.from_numpy(np.asarray(ids, dtype=np.int64))[1:, None])[:, 0]


@lru_cache(maxsize=4)
def text_folder(family: str, seed: int = 5) -> Path:
    """A model that reads text only, with the tokenizer of a vision-language family."""
    tokenizer = tokenizer_of(family)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    folder = _root() / f"text-{family}-{seed}"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
