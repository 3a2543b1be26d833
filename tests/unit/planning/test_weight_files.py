"""Models with incomplete files (a cut download, a clone without git-lfs) are refused before they are loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import ASSETS

from understudy.config import Recipe, parse_recipe
from understudy.errors import DataError, PolicyError
from understudy.planning.models.folder import ModelFolder
from understudy.planning.preflight import preflight
from understudy.policy.load import load_student
from understudy.trainers.models import load_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1461472\n"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ASSETS / "models" / "student", tmp_path / "model"))


def split(model: Path) -> None:
    """One file of weights becomes two and an index."""
    weights = load_file(model / "model.safetensors")
    names = sorted(weights)
    halves = {SHARDS[0]: names[::2], SHARDS[1]: names[1::2]}
    for shard, own in halves.items():
        save_file({name: weights[name] for name in own}, model / shard, metadata={"format": "pt"})
    (model / "model.safetensors").unlink()
    places = {name: shard for shard, own in halves.items() for name in own}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def no_shard(model: Path) -> None:
    split(model)
    (model / SHARDS[1]).unlink()


def cut_shard(model: Path) -> None:
    split(model)
    cut(model / SHARDS[1])


def broken_index(model: Path) -> None:
    split(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": [')


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda m: cut(m / "model.safetensors"), r"model.safetensors has [\d,]+ bytes, its header promises [\d,]+; download"),
    "longer": (lambda m: (m / "model.safetensors").open("ab").write(b"more"), "its header promises"),
    "empty": (lambda m: (m / "model.safetensors").write_bytes(b""), r"\(0 bytes\) is not a complete safetensors file"),
    "another format": (lambda m: (m / "model.safetensors").write_bytes(b"PK\x03\x04" * 100), "is not a complete safetensors file"),
    "pointer": (lambda m: (m / "model.safetensors").write_text(POINTER), "model.safetensors is a git-lfs pointer.*git lfs pull"),
    "pointer of the tokenizer": (lambda m: (m / "tokenizer.json").write_text(POINTER), "tokenizer.json is a git-lfs pointer"),
    "cut tokenizer": (lambda m: cut(m / "tokenizer.json"), r"tokenizer.json cannot be read \(.*\); download or copy it again"),
    "no shard": (no_shard, f"{SHARDS[1]} of the 2 files named in .* is missing"),
    "cut shard": (cut_shard, f"{SHARDS[1]} has .* its header promises"),
    "broken index": (broken_index, "is not an index of weight files"),
    "config.json": (lambda m: (m / "config.json").write_text('{"vocab'), "config.json is not a JSON object"),
    "generation_config.json": (lambda m: (m / "generation_config.json").write_text("["), "generation_config.json is not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_an_incomplete_model_is_refused_and_the_file_is_named(model: Path, name: str) -> None:
    change, message = BROKEN[name]
    change(model)
    with pytest.raises(DataError, match=message) as error:
        ModelFolder.open(str(model), "student.model")
    assert str(error.value).startswith(f"student.model = '{model}': ")


def test_an_adapter_folder_is_refused_as_a_model(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    with pytest.raises(
        DataError, match=r"an adapter of Qwen/Qwen3-0.6B, not a model; merge it into its base"
    ):
        ModelFolder.open(str(model), "teachers.t.model")


def edit(file: Path, **change: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def recipe_of(model: Path) -> Recipe:
    return parse_recipe(
        {
            "student": {"model": str(model)},
            "teachers": {"t": {"model": str(ASSETS / "models" / "teacher-add")}},
            "data": {"train": str(ASSETS / "data" / "train.jsonl")},
            "rollout": {"max_new_tokens": 8},
            "loss": {"topk": 8},
            "trainer": {"steps": 1, "batch_size": 4},
        }
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantized (awq)"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "has an encoder and a decoder"),
        ({"model_type": "of-tomorrow"}, "has no model type 'of-tomorrow'; upgrade transformers"),
        ({"model_type": None}, "needs model_type in config.json"),
    ],
)
def test_a_student_that_cannot_be_trained_is_refused_by_its_config(
    model: Path, change: dict[str, object], message: str
) -> None:
    edit(model / "config.json", **change)
    [problem] = preflight(recipe_of(model))
    assert message in problem and problem.startswith("student.model = ")


def test_a_tokenizer_of_a_later_release_is_refused_with_the_other_problems(model: Path) -> None:
    """The tokenizers library raises a bare Exception for valid JSON that it does not know."""
    known = json.loads((model / "tokenizer.json").read_text())
    edit(model / "tokenizer.json", model=known["model"] | {"type": "OfTomorrow"})
    [problem] = preflight(recipe_of(model))
    assert "tokenizer.json cannot be read by tokenizers" in problem and "upgrade tokenizers" in problem


NO_END_TOKEN = (
    "names a token that ends a turn, so no rollout could end; set eos_token_id in its generation_config.json"
)


def test_a_student_whose_files_name_no_end_of_turn_token_is_refused(model: Path) -> None:
    """Without this check `load_model` refuses it only after the teachers were started. The end token in config.json is
    ignored if there is a generation_config.json."""
    edit(model / "generation_config.json", eos_token_id=None)
    assert not preflight(recipe_of(model))
    edit(model / "tokenizer_config.json", eos_token=None)
    [problem] = preflight(recipe_of(model))
    assert NO_END_TOKEN in problem
    with pytest.raises(DataError, match="names no end-of-sequence token"):
        load_model(str(model), device="cpu")
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>"}))
    assert not ModelFolder(model).has_no_end
    edit(model / "special_tokens_map.json", eos_token=None)
    (model / "generation_config.json").unlink()  # config.json has an id
    assert not ModelFolder(model).has_no_end
    assert ModelFolder(model).ends == (2,)
    assert load_model(str(model), device="cpu").stop_ids == (2,)
    edit(model / "config.json", eos_token_id=None)
    assert ModelFolder(model).has_no_end
    edit(
        model / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer"
    )  # this class has an end token of its own
    assert not ModelFolder(model).has_no_end


def test_a_vocabulary_that_the_config_leaves_out_is_read_from_the_embedding_or_the_tokenizer(
    model: Path,
) -> None:
    """The text_config of Gemma 3 (4B and larger) lists only what differs from transformers' defaults."""
    size = ModelFolder.open(str(model), "student.model").vocab_size
    config = json.loads((model / "config.json").read_text())
    del config["vocab_size"]
    (model / "config.json").write_text(json.dumps(config))
    assert ModelFolder.open(str(model), "student.model").vocab_size == size == 44
    (model / "model.safetensors").unlink()  # a hub id: only the small files are there
    assert ModelFolder(model).vocab_size == 44


def test_sharded_weights_have_as_many_parameters_as_one_file_and_other_files_are_ignored(model: Path) -> None:
    whole = ModelFolder.open(str(model), "student.model").parameters
    split(model)
    save_file({"tok_embeddings.weight": torch.zeros(1000)}, model / "consolidated.safetensors")
    folder = ModelFolder.open(str(model), "student.model")
    assert [file.name for file in folder.weight_files] == SHARDS
    assert folder.parameters == whole


def test_load_student_reports_weights_that_cannot_be_read(model: Path) -> None:
    cut(model / "model.safetensors")
    with pytest.raises(
        PolicyError, match=r"cannot be loaded: its weights cannot be read .*download or copy the model again"
    ):
        load_student(str(model))
