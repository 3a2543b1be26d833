"""LoRA: adapters are trained and the base is not; engines and exports get a merged model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_student import cross_entropy, qwen3, settings, token_mean, varied_batch

from understudy.errors import PolicyError
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.lora import LoraSettings, adapted_weights, add_lora, merged_weights
from understudy.policy.policy import Policy

LORA = LoraSettings(rank=4, alpha=8.0)


def step(policy: Policy, seed: int) -> float:
    batch = varied_batch(seed=seed)
    return policy.update(batch, cross_entropy, token_mean(batch)).loss


@pytest.fixture(autouse=True)
def _peft() -> None:
    pytest.importorskip("peft")


def test_only_adapters_are_trained_and_the_merged_model_equals_the_adapted_one() -> None:
    frozen = dict(qwen3().named_parameters())
    policy = Policy(qwen3(), settings(lora=LORA))
    first = step(policy, 0)
    assert first == pytest.approx(step(Policy(qwen3(), settings()), 0), abs=1e-6)
    for seed in (0, 0, 0):
        last = step(policy, seed)
    assert last < first
    for name, parameter in policy.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, frozen[name.replace(".base_layer", "")]), name
    merged = dict(policy.named_weights())
    assert merged.keys() == frozen.keys()
    plain = qwen3()
    plain.load_state_dict(merged, strict=False)
    ids = torch.arange(12)[None]
    assert torch.allclose(plain.eval()(ids).logits, policy.model.eval()(ids).logits, atol=1e-5)


def test_merged_weights_equal_those_of_peft() -> None:
    model = qwen3()
    add_lora(model, LORA)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)
    merged = dict(merged_weights(model))
    layer = model.model.layers[1].mlp.down_proj
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.allclose(merged["model.layers.1.mlp.down_proj.weight"], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_hold_only_adapters_and_resume_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    straight, first = (Policy(qwen3(dtype=dtype), settings(lora=LORA)) for _ in range(2))
    for seed in range(4):
        step(straight, seed)
    for seed in range(2):
        step(first, seed)
    CheckpointStore(tmp_path).save(2, first.state())
    saved = CheckpointStore(tmp_path).load().policy
    assert all("lora_" in name for name in saved.model)
    resumed = Policy(qwen3(dtype=dtype), settings(lora=LoraSettings(rank=4, alpha=8.0, seed=7)))
    resumed.load_state(saved)
    for seed in (2, 3):
        step(resumed, seed)
    for (name, one), (_, other) in zip(straight.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(one, other), name


def test_export_merges_the_adapters(tmp_path: Path) -> None:
    from test_policy_export import save_base
    from transformers import AutoModelForCausalLM

    from understudy.policy.checkpoints.export import export
    from understudy.policy.load import load_student

    base = save_base(tmp_path / "base")
    policy = Policy(load_student(str(base)).model, settings(lora=LORA))
    step(policy, 0)
    saved = CheckpointStore(tmp_path / "checkpoints").save(1, policy.state())
    loaded = AutoModelForCausalLM.from_pretrained(export(saved, base, tmp_path / "out", {}))
    merged = dict(policy.named_weights())
    for name, parameter in loaded.named_parameters():
        assert torch.allclose(parameter, merged[name], atol=1e-7), name


@pytest.mark.parametrize("averaged", [False, True])
def test_an_exported_adapter_on_its_base_equals_the_merged_export(tmp_path: Path, averaged: bool) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from test_policy_export import save_base
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from understudy.policy.checkpoints.export import export
    from understudy.policy.load import load_student

    base = save_base(tmp_path / "base")
    policy = Policy(load_student(str(base)).model, settings(lora=LORA, ema_decay=0.5))
    for seed in range(3):
        step(policy, seed)
    saved = CheckpointStore(tmp_path / "checkpoints").save(3, policy.state())
    merged = AutoModelForCausalLM.from_pretrained(
        export(saved, base, tmp_path / "merged", {}, averaged=averaged)
    )
    out = export(saved, base, tmp_path / "adapter", {"step": 3}, averaged=averaged, adapter=True)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {
        file.name for file in out.iterdir()
    }
    assert "library_name: peft" in (out / "README.md").read_text()
    assert not (out / "model.safetensors").exists() and not (out / "config.json").exists()
    ids = torch.arange(12)[None]
    untrained = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(untrained(ids).logits, merged(ids).logits, atol=1e-4)
    adapted = PeftModel.from_pretrained(untrained, out)
    assert adapted.peft_config["default"].base_model_name_or_path == str(base)
    assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-5)
    assert torch.allclose(
        AutoPeftModelForCausalLM.from_pretrained(out)(ids).logits, merged(ids).logits, atol=1e-5
    )
    assert AutoTokenizer.from_pretrained(out).eos_token_id == 2
    again = export(saved, base, tmp_path / "again", {"step": 3}, averaged=averaged, adapter=True)
    assert (again / "adapter_config.json").read_bytes() == (out / "adapter_config.json").read_bytes()


def test_exporting_an_adapter_of_a_run_without_adapters_is_refused(tmp_path: Path) -> None:
    from test_policy_export import save_base

    from understudy.errors import CheckpointError
    from understudy.policy.checkpoints.export import export

    saved = CheckpointStore(tmp_path / "checkpoints").save(1, Policy(qwen3(), settings()).state())
    with pytest.raises(CheckpointError, match="no adapter: the run trained whole weights"):
        export(saved, save_base(tmp_path / "base"), tmp_path / "out", {}, adapter=True)
    assert not (tmp_path / "out").exists()


def test_lora_targets_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(PolicyError, match="do not fit Qwen3ForCausalLM"):
        Policy(qwen3(), settings(lora=LoraSettings(targets=("nonsense",))))


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("self_attn.o_proj",), ("proj",), ("lm_head",)])
def test_adapted_weights_are_those_that_peft_adapts(targets: tuple[str, ...]) -> None:
    model = qwen3(tied=False)
    named = adapted_weights(model, targets)
    try:
        add_lora(model, LoraSettings(rank=1, targets=targets))
    except PolicyError:
        assert not named
    ours = {name.replace(".base_layer", "") for name, _ in model.named_parameters() if ".base_layer." in name}
    assert named == ours
