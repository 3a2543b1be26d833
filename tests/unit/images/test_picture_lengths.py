"""Token counts of prompts with pictures, `data.overlong`, and picture files that change between two launches."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vision_models import CONTEXT, folder_of, picture, reader_of

from understudy.config import parse_recipe
from understudy.errors import DataError
from understudy.media.pictures import Pictures, hashes_in
from understudy.media.sources import FILE_NAME, PictureSources
from understudy.media.store import MediaStore, hash_of
from understudy.planning.data_checks import prompt_length
from understudy.planning.image_checks import with_picture_tokens
from understudy.planning.models.folder import ModelFolder
from understudy.rollout.dataset import load_dataset
from understudy.rollout.render import Renderer
from understudy.trainers.prompt_data import open_data, pictures_of

SIZES = ((24, 24), (80, 24), (64, 64))


def recipe_of(tmp_path: Path, family: str, **data: Any) -> Any:
    rows = []
    for i, size in enumerate(SIZES):
        (tmp_path / f"{i}.png").write_bytes(picture("red", size, (i, i)))
        rows.append({"messages": [{"role": "user", "content": "<image>colour?"}], "images": [f"{i}.png"]})
    rows.append({"messages": [{"role": "user", "content": "one word, or many words, of text alone?"}]})
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {
        "student": {"model": str(folder_of(family))},
        "teachers": {"t": {"model": str(folder_of(family))}},
        "data": {"train": str(path), **data},
        "rollout": {"max_new_tokens": 4},
        "trainer": {"steps": 1},
    }
    return parse_recipe(table)


def rendered(recipe: Any, tmp_path: Path) -> list[int]:
    """The lengths of the prompts that a run renders."""
    folder = Path(recipe.student.model)
    dataset = load_dataset(recipe.data.train).storing(Pictures(MediaStore(tmp_path / "media")))
    reader = reader_of(folder, MediaStore(tmp_path / "media"))

    renderer = Renderer(AutoTokenizer.from_pretrained(folder), context=CONTEXT, pictures=reader)
    return [len(renderer.render(dataset.prompt(i, key=str(i), epoch=0))) for i in range(len(dataset))]


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_check_measures_the_prompt_lengths_that_a_run_renders(family: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, family)
    lengths = rendered(recipe, tmp_path)
    assert min(lengths[:3]) < max(lengths[:3]), "pictures of different sizes have different numbers of tokens"
    folder = ModelFolder.open(recipe.student.model, "student.model")
    measure = with_picture_tokens(prompt_length(folder, recipe), recipe, folder)
    found = [measure(row) for row in load_dataset(recipe.data.train).rows]
    assert [one.length if one else None for one in found] == lengths


def limited(tmp_path: Path, rule: str) -> Any:
    recipe = recipe_of(tmp_path, "qwen3_vl")
    lengths = rendered(recipe, tmp_path)
    assert lengths[2] > lengths[0] + 1
    return recipe_of(tmp_path, "qwen3_vl", overlong=rule, max_prompt_tokens=lengths[0] + 1), lengths


def test_rows_whose_pictures_are_too_long_are_dropped(tmp_path: Path) -> None:
    recipe, lengths = limited(tmp_path, "drop")
    over = [n for n, length in enumerate(lengths) if length > recipe.data.max_prompt_tokens]
    found = open_data(recipe.data, recipe.rollout, recipe.student)
    assert len(found.train) == len(lengths) - len(over) and 2 in over
    assert (
        f"{len(over)} of 4 prompts have more than {lengths[0] + 1} tokens and are left out" in found.notes[0]
    )


def test_truncate_left_drops_prompts_with_pictures_and_truncates_text(tmp_path: Path) -> None:
    recipe, lengths = limited(tmp_path, "truncate_left")
    found = open_data(recipe.data, recipe.rollout, recipe.student)
    assert lengths[3] > recipe.data.max_prompt_tokens, "the row of text is truncated"
    assert [row["messages"][0]["content"] for row in found.train.rows][-1].startswith("one word")
    notes = " ".join(found.notes)
    assert "1 of 4 prompts have more than" in notes and "and lose their beginning" in notes
    assert "prompts with pictures have more than" in notes and "and are left out" in notes


def test_a_prompt_whose_pictures_are_too_long_is_an_error_by_default(tmp_path: Path) -> None:
    recipe, _ = limited(tmp_path, "error")
    with pytest.raises(DataError, match=r"train.jsonl.* has \d+ tokens; data.max_prompt_tokens"):
        open_data(recipe.data, recipe.rollout, recipe.student)


def hashes(recipe: Any, media: Path) -> list[str]:
    """The pictures of all prompts, as a launch of the run stores them."""
    dataset = load_dataset(recipe.data.train).storing(pictures_of(recipe.data, media))
    prompts = [dataset.prompt(i, key=str(i), epoch=0) for i in range(len(SIZES))]
    return [name for prompt in prompts for name in hashes_in(prompt.messages)]


def test_a_resumed_run_uses_its_stored_pictures_and_warns_of_a_file_that_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, media = recipe_of(tmp_path, "qwen3_vl"), tmp_path / "run" / "media"
    before = hashes(recipe, media)
    (tmp_path / "0.png").write_bytes(picture("blue", SIZES[0]))
    (tmp_path / "1.png").unlink()
    os.utime(tmp_path / "2.png", (1, 1))
    with (media / FILE_NAME).open("a") as file:
        file.write('{"source": "torn')
    with caplog.at_level(logging.WARNING):
        assert hashes(recipe, media) == before
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "0.png was changed since this run first read it" in messages[0]
    fresh = hashes_in_new_run(recipe, tmp_path / "other" / "media")
    assert fresh == hash_of(picture("blue", SIZES[0]))


def hashes_in_new_run(recipe: Any, media: Path) -> str:
    dataset = load_dataset(recipe.data.train).storing(pictures_of(recipe.data, media))
    return hashes_in(dataset.prompt(0, key="0", epoch=0).messages)[0]


def test_a_stored_picture_that_was_deleted_is_read_from_its_source_again(tmp_path: Path) -> None:
    recipe, store = recipe_of(tmp_path, "qwen3_vl"), MediaStore(tmp_path / "run" / "media")
    before = hashes(recipe, store.folder)
    store.path(before[0]).unlink()
    assert PictureSources.open(store).stored(str(tmp_path / "0.png")) is None
    assert hashes(recipe, store.folder) == before and store.has(before[0])


def test_an_incomplete_line_in_the_list_of_sources_does_not_lose_other_entries(tmp_path: Path) -> None:
    store, files = MediaStore(tmp_path / "media"), [tmp_path / "a.png", tmp_path / "b.png"]
    for file, colour in zip(files, ("red", "green"), strict=True):
        file.write_bytes(picture(colour, (8, 8)))
    names = [store.put(file.read_bytes()) for file in files]
    PictureSources.open(store).add(str(files[0]), names[0])
    with (store.folder / FILE_NAME).open("a") as file:
        file.write('{"source": "cut o')
    PictureSources.open(store).add(str(files[1]), names[1])
    found = PictureSources.open(store)
    assert [found.stored(str(file)) for file in files] == names
