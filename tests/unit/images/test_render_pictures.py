"""Prompts with pictures have the ids that transformers' processors give; literal placeholders are text."""

from __future__ import annotations

import io
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Processor, SmolVLMProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from vision_models import FAMILIES, folder_of, picture, reader_of

from understudy.assembly.teachers.prompts import teacher_prompts_of
from understudy.config import RolloutConfig, TeacherConfig
from understudy.errors import DataError
from understudy.media.for_vllm import one_marker_each
from understudy.media.pictures import Pictures
from understudy.media.store import MediaStore
from understudy.rollout.dataset import load_dataset
from understudy.rollout.render import Renderer
from understudy.types.usable_ids import UsableIds

_PROCESSORS = {
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "smolvlm": SmolVLMProcessor,
    "idefics3": Idefics3Processor,
}


class NoVideos:
    """A stand-in for the video processor, which needs torchvision; no test has a video."""

    merge_size = 2


def own_ids(folder: Path, family: str, text: str, pictures: list[bytes]) -> list[int]:
    """The ids by transformers' processor, which expands the markers itself."""
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = object.__new__(_PROCESSORS[family])
    made.image_processor, made.tokenizer = images, tokenizer
    made.video_processor, made.chat_template = NoVideos(), tokenizer.chat_template
    made.image_token = "<|image_pad|>" if family.startswith("qwen") else "<image>"
    made.image_seq_len, made.fake_image_token, made.global_image_token = (
        4,
        "<fake_token_around_image>",
        "<global-img>",
    )
    made.global_image_tag = "<global-img>"
    opened = [Image.open(io.BytesIO(data)) for data in pictures]
    options: dict[str, Any] = {} if family.startswith("qwen") else {"return_row_col_info": True}
    found = images(images=opened if family.startswith("qwen") else [opened], return_tensors="np", **options)
    for i in range(len(pictures)):
        text = text.replace(made.image_token, f"[[{i}]]", 1)
    for i in range(len(pictures)):
        text = text.replace(f"[[{i}]]", made.replace_image_token(found, i))
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def renderer_of(family: str, store: MediaStore) -> Renderer:
    folder = folder_of(family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Renderer(tokenizer, context=512, pictures=reader_of(folder, store))


@pytest.mark.parametrize("family", FAMILIES)
def test_rendered_ids_equal_those_of_transformers_processor(family: str, tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    pictures = [picture("red"), picture("blue", (70, 30), (5, 5)), picture("green", (33, 100))]
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "first "}, {"type": "image", "image": pictures[0]}],
        },
        {"role": "assistant", "content": "seen"},
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": " and "}, {"type": "image"}],
        },
    ]
    messages[0]["content"][1] = {"type": "image"}
    data = load_dataset([{"messages": messages, "images": pictures}]).storing(Pictures(store))
    prompt = data.prompt(0, key="a", epoch=0)
    ids = renderer_of(family, store).render(prompt)
    tokenizer = AutoTokenizer.from_pretrained(folder_of(family))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids.tolist() == own_ids(folder_of(family), family, text, pictures)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_literal_placeholder_in_a_message_is_rendered_as_text(family: str, tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    renderer = renderer_of(family, store)
    assert renderer.pictures is not None
    literal = renderer.pictures.processor.image_token
    text = f"what is {literal}{literal} here?"
    rows = [
        {"messages": [{"role": "user", "content": text}]},
        {"prompt": text},
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}],
         "images": [picture("red")]},
    ]  # fmt: skip
    data = load_dataset(rows).storing(Pictures(store))
    places = renderer.pictures.processor.placeholder_ids
    for ordinal, pictures in enumerate((0, 0, 1)):
        prompt = data.prompt(ordinal, key="a", epoch=0)
        ids = renderer.render(prompt)
        count = renderer.pictures.count(store.put(picture("red"))) if pictures else 0
        assert int(np.isin(ids, places).sum()) == count
        assert text in renderer.tokenizer.decode(ids.tolist(), skip_special_tokens=True).replace(
            "assistant", ""
        )


def test_a_text_student_refuses_pictures_and_a_missing_picture_is_reported(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    rows = [
        {"messages": [{"role": "user", "content": "<image>?"}], "images": [picture("red")]},
        {"messages": [{"role": "user", "content": "<image>?"}], "images": ["nowhere.png"]},
    ]
    data = load_dataset(rows).storing(Pictures(store))
    tokenizer = AutoTokenizer.from_pretrained(folder_of("qwen3_vl"))
    with pytest.raises(DataError, match=r"1 picture\(s\), and the student reads text only"):
        Renderer(tokenizer, context=512).render(data.prompt(0, key="a", epoch=0))
    with pytest.raises(DataError, match=r"nowhere\.png does not exist"):
        renderer_of("qwen3_vl", store).render(data.prompt(1, key="b", epoch=0))


def test_a_prompt_with_pictures_is_refused_and_not_truncated(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    row = {"messages": [{"role": "user", "content": "<image>" + "long " * 20}], "images": [picture("red")]}
    data = load_dataset([row]).storing(Pictures(store))
    folder = folder_of("qwen3_vl")
    renderer = Renderer(
        AutoTokenizer.from_pretrained(folder),
        context=512,
        max_prompt=40,
        truncate=True,
        pictures=reader_of(folder, store),
    )
    with pytest.raises(DataError, match=r"tokens; data\.max_prompt_tokens is 40"):
        renderer.render(data.prompt(0, key="a", epoch=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_placeholders_of_each_picture_are_replaced_by_one_marker(family: str, tmp_path: Path) -> None:
    """Also for adjacent pictures, and for the beginning of a row that has only the first picture."""
    store = MediaStore(tmp_path)
    reader = reader_of(folder_of(family), store)
    names = tuple(store.put(picture("red", size)) for size in ((40, 24), (70, 30), (24, 24)))
    pad = reader.processor.image_token_id
    shown = [reader.processor.ids_of(reader.size(name)) for name in names]
    row = np.array([50, *shown[0], *shown[1], 51, 52, *shown[2]], np.int32)
    assert one_marker_each(reader, "row", row, names).tolist() == [50, pad, pad, 51, 52, pad]
    first = row[: 1 + len(shown[0])]
    assert one_marker_each(reader, "row", first, names).tolist() == [50, pad]
    assert one_marker_each(reader, "row", np.array([52], np.int32), ()).tolist() == [52]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_literal_placeholder_in_a_teachers_own_prompt_is_rendered_as_text(
    family: str, tmp_path: Path
) -> None:
    """As in the student's prompt."""
    renderer = renderer_of(family, MediaStore(tmp_path / "media"))
    assert renderer.pictures is not None
    literal = renderer.pictures.processor.placeholder_texts[0]
    row = {"messages": [{"role": "user", "content": f"what is {literal}?"}]}
    prompt = load_dataset([row]).prompt(0, key="00000-0000000", epoch=0)
    teachers = {"told": TeacherConfig(model="m", prompt="{{ prompt }} A marker.")}
    usable = UsableIds(1 << 20).without(renderer.pictures.processor.placeholder_ids)
    prompts = teacher_prompts_of(
        teachers, RolloutConfig(), renderer.tokenizer, {}, usable, AsyncExitStack(), renderer.pictures
    )
    ids = prompts.ids("told", prompt)
    assert ids is not None and f"what is {literal}? A marker." in renderer.tokenizer.decode(ids)
    assert not {*ids.tolist()} & {*renderer.pictures.processor.placeholder_ids}
