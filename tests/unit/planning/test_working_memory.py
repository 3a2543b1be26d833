"""Planned activations, keys and values compared with those of real models, and settings that fit a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from understudy.cli.main import main
from understudy.config import Recipe, parse_recipe
from understudy.engines.local.kv_pool import KVFormat
from understudy.engines.local.slots import pool_bytes
from understudy.nn.compiled_layers import compile_layers
from understudy.planning.memory.advice import fits, gpu_loads, settings_that_fit
from understudy.planning.memory.shapes import DecoderShape
from understudy.planning.memory.working import engine_work
from understudy.planning.processes import plan_processes
from understudy.planning.seating import seat
from understudy.policy.forward.attention import VARLEN
from understudy.policy.forward.packed import lay_out

ASSETS = Path(__file__).parents[3] / "src/understudy/assets/quickstart"
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
TOKENS = 512
SMALL = DecoderShape(2, 64, 160, 4, 2, 16, 128, False, 4096)
SHAPE_1_5B = DecoderShape(24, 1536, 8960, 12, 2, 128, 151_936, False, 32_768)
SHAPE_0_6B = DecoderShape(28, 1024, 3072, 16, 8, 128, 151_936, True, 40_960)


def model_of(kind: str, layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config, made = KINDS[kind]
    model = made(config(num_hidden_layers=layers, **SIZES)).to(torch.bfloat16)
    model.train()
    model.set_attn_implementation(VARLEN)
    return model


def saved_activation_bytes(model: PreTrainedModel) -> int:
    """Bytes of the storages that a forward pass keeps for its backward pass, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # references, so that no address is reused

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    line = lay_out(torch.randint(0, 128, (1, TOKENS)), [TOKENS // 2] * 2, group=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.model(input_ids=line.ids_1U, position_ids=line.position_ids_1U, use_cache=False, **line.options)
    return sum(storage.nbytes() for storage in storages.values())


def shape_of(kind: str) -> DecoderShape:
    return DecoderShape(1, 64, 160, 4, 2, 16, 128, kind == "qwen3", 4096)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_saves_as_many_activation_bytes_as_planned(kind: str) -> None:
    one, two = (saved_activation_bytes(model_of(kind, layers)) for layers in (1, 2))
    assert (two - one) / TOKENS == shape_of(kind).kept_per_token(2, compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_saves_as_many_activation_bytes_as_planned(kind: str) -> None:
    models = [model_of(kind, layers) for layers in (1, 2)]
    assert all(compile_layers(model.model) for model in models)
    one, two = map(saved_activation_bytes, models)
    assert (two - one) / TOKENS == shape_of(kind).kept_per_token(2, compiled=True)


def test_a_layer_with_gradient_checkpointing_saves_only_its_input() -> None:
    found = []
    for layers in (1, 2):
        model = model_of("qwen2", layers)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.append(saved_activation_bytes(model))
    assert (found[1] - found[0]) / TOKENS == 2 * 64
    deep, shallow = (
        DecoderShape(layers, 64, 160, 4, 2, 16, 128, False, 4096).training(
            TOKENS, TOKENS, 2, compiled=False, checkpointed=True, whole_rows=False
        )
        for layers in (2, 1)
    )
    assert (deep - shallow) / TOKENS == 2 * 64


@pytest.mark.parametrize(("compiled", "measured"), [(False, 73), (True, 50)])
def test_the_planned_memory_of_an_update_matches_the_measurement_on_an_h200(
    compiled: bool, measured: int
) -> None:
    """0.6B, micro-batches of 32,768 tokens (docs/experiments.md, "A whole step on a GPU")."""
    work = SHAPE_0_6B.training(32_768, 26_214, 2, compiled=compiled, checkpointed=False, whole_rows=False)
    states = 596_049_920 * 18
    assert (work + states) / 2**30 == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("narrow", [False, True])
def test_the_planned_kv_pool_is_as_large_as_that_of_the_engine(narrow: bool) -> None:
    model = AutoModelForCausalLM.from_config(Qwen2Config(num_hidden_layers=2, **SIZES)).to(torch.bfloat16)
    kv_format = KVFormat.FP8 if narrow else KVFormat.MODEL
    expected = pool_bytes(model, slots=7, max_length=96, kv_format=kv_format)
    assert SMALL.keys_and_values(7, 96, 2, narrow) == expected


def recipe_of(folder: Path, *, rows: int, length: int, **student: Any) -> Recipe:
    """A 1.5B student in the format of a model folder, whose weight file has a header and no weights."""
    config = {
        "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 1536, "intermediate_size": 8960,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 32_768,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1_356_500_000], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return parse_recipe(
        {
            "student": {"model": str(folder), "dtype": "bfloat16", **student},
            "teachers": {"t": {"model": str(folder), "dtype": "bfloat16"}},
            "rollout": {"max_new_tokens": 1024, "context_length": length},
            "data": {"train": "prompts.jsonl"},
            "trainer": {"batch_size": rows},
        }
    )


def test_long_rows_increase_the_planned_activations_and_the_kv_pool(tmp_path: Path) -> None:
    long, short = (recipe_of(tmp_path / "m", rows=4, length=length) for length in (32_768, 512))
    planned = [plan_processes(one, seat(one, 1)) for one in (long, short)]
    trainer, replica = planned[0][0], planned[0][1]
    slot = 32_768 * 24 * 2 * 2 * 128 * 2
    assert engine_work(long)[0] == 129 * slot
    assert trainer.working_bytes > 129 * slot + 32_768 * 24 * SHAPE_1_5B.kept_per_token(2, False)
    assert replica.working_bytes > 32_768 * 6 * 8960
    assert planned[1][0].working_bytes < trainer.working_bytes / 10
    assert plan_processes(long, seat(long, 0))[0].working_bytes == 0, "a CPU's rows are not planned"


@pytest.mark.parametrize(("gib", "expected"), [(400, {}), (140, {"rollout.max_batch": 4}),
    (80, {"rollout.max_batch": 4, "student.gradient_checkpointing": True})])  # fmt: skip
def test_the_suggested_settings_fit_the_memory_of_a_gpu(
    tmp_path: Path, gib: int, expected: dict[str, Any]
) -> None:
    one = recipe_of(tmp_path / "m", rows=4, length=32_768)
    changed = settings_that_fit(one, gib << 30)
    assert changed == expected
    for key, value in changed.items():
        section, field = key.split(".")
        one = one.model_copy(update={section: getattr(one, section).model_copy(update={field: value})})
    assert fits(one, gib << 30)
    assert max(gpu_loads(plan_processes(one, seat(one, 1))).values()) < gib << 30


def test_plan_reports_whether_the_gpu_memory_suffices_and_refuses_invalid_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    arguments = [str(ASSETS / "recipe.toml"), "--gpus", "5", "student.device=cuda:0"]
    assert main(["plan", *arguments, "--gpu-memory", "80"]) == 0
    assert "GiB at most of 80.0" in capsys.readouterr().out
    assert main(["plan", *arguments, "--gpu-memory", "0.1"]) == 0
    assert "that is too much" in capsys.readouterr().out
    for size in ("nan", "-1", "0"):
        assert main(["plan", *arguments, "--gpu-memory", size]) == 2
        assert f"--gpu-memory {size}: expected GiB of one GPU, above 0" in capsys.readouterr().err
