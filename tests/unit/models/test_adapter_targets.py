"""`student.lora.targets` that name no layer of the student are found in its files, before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import make
from test_own_code import ROWS

from understudy.config import Recipe, parse_recipe
from understudy.errors import PolicyError
from understudy.planning.models.adapter_targets import targets_fit
from understudy.planning.models.folder import ModelFolder
from understudy.policy.lora import LoraSettings, add_lora, merged_weights


def saved(name: str, folder: Path) -> ModelFolder:
    make(name).save_pretrained(folder)
    return ModelFolder(folder)


def recipe_of(folder: ModelFolder, lora: dict[str, Any]) -> Recipe:
    return parse_recipe(
        {
            "student": {"model": str(folder.path), "lora": lora},
            "teachers": {"t": {"model": str(folder.path)}},
            "data": {"train": str(ROWS)},
        }
    )


def found(folder: ModelFolder, **lora: Any) -> tuple[list[str], list[str]]:
    return targets_fit(recipe_of(folder, lora), folder)


def test_a_target_that_no_layer_has_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    folder = saved("qwen3", tmp_path)
    for targets in (["q_porj", "v_proj"], ["q_porj"]):
        [problem], notes = found(folder, targets=targets)
        assert problem.startswith("student.lora.targets: student.model = ") and not notes
        assert (
            "no layer whose name ends in 'q_porj'; did you mean 'q_proj'? Expected some of down_proj, gate_proj"
            in problem
        )
    assert found(folder, targets=["q_proj", "mlp.up_proj", "lm_head"]) == ([], [])
    assert found(folder, targets=["attn.q_proj"])[0], "a target matches only whole parts of a name"


def test_default_targets_that_a_model_lacks_give_a_note_or_a_refusal_if_it_lacks_all(tmp_path: Path) -> None:
    """Phi-3 has one layer for queries, keys and values, and one for gate and up."""
    assert found(saved("qwen3", tmp_path / "qwen3")) == ([], [])
    problems, [note] = found(saved("phi3", tmp_path / "phi3"))
    assert not problems
    assert (
        "has no q_proj, k_proj, v_proj, gate_proj, up_proj; of the default targets o_proj, down_proj get adapters"
        in note
    )
    assert note.endswith("Its other layers: gate_up_proj, qkv_proj")
    [problem], _ = found(saved("gpt2", tmp_path / "gpt2"))
    assert "has no layer with one of the default names" in problem and problem.endswith(
        "c_attn, c_fc, c_proj"
    )


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gpt2", "gpt-neox", "starcoder2", "qwen3-moe", "glm4"])
def test_every_target_that_the_check_accepts_gets_adapters(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = saved(name, tmp_path)
    own = {
        layer.rpartition(".")[2] for layer in folder.matrices if ".0." in layer and ".experts." not in layer
    }
    for target in sorted(own - {"gate"}):  # a router is no linear layer
        assert found(folder, targets=[target]) == ([], [])
        model = make(name)
        add_lora(model, LoraSettings(targets=(target,)))
        assert any("lora_" in one for one, _ in model.named_parameters())
    with pytest.raises(PolicyError, match="do not fit"):
        add_lora(make(name), LoraSettings(targets=("q_porj",)))
    assert found(folder, targets=["q_porj"])[0]


def test_targets_are_not_checked_for_a_model_whose_weights_are_not_on_this_machine(tmp_path: Path) -> None:
    folder = saved("qwen3", tmp_path)
    recipe = recipe_of(folder, {"targets": ["q_porj"]})
    (tmp_path / "model.safetensors").unlink()
    assert targets_fit(recipe, ModelFolder(tmp_path)) == ([], [])


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_adapters_of_experts_are_refused_because_they_cannot_be_merged(name: str) -> None:
    """They would be trained, but engines and exports would get the experts of the base model."""
    pytest.importorskip("peft")
    with pytest.raises(
        PolicyError, match=r"name weights of experts .* set student.lora.targets to other layers"
    ):
        add_lora(make(name), LoraSettings())
    targets = ("o_proj",)
    adapted, plain = make(name), make(name)
    add_lora(adapted, LoraSettings(targets=targets))
    for one, weight in adapted.named_parameters():
        if "lora_" in one:
            weight.data.normal_(0, 0.3)
    plain.load_state_dict(dict(merged_weights(adapted)), strict=False)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(plain(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
