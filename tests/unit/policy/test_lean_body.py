"""Layers with gradients written out give what transformers' layers and autograd give, and step aside for all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_student import llama, qwen3, windowed
from test_policy_packed import related_rows, trained
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from understudy.policy.cpu import lean_body, lean_layers
from understudy.policy.forward import packed
from understudy.policy.load import switch_off_dropout
from understudy.policy.lora import LoraSettings, add_lora

MODELS = {"qwen3": qwen3, "untied": lambda: qwen3(tied=False), "llama": llama}


@pytest.mark.parametrize("beginning", [0, 4, 11], ids=["nothing shared", "4 shared", "11 shared"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(
    name: str, beginning: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = related_rows(beginning)
    assert lean_body.is_known(MODELS[name]().model)
    mine = trained(MODELS[name](), batch)
    monkeypatch.setattr(packed, "lean_states", lambda *given: None)
    theirs = trained(MODELS[name](), batch)
    for own, other in zip(mine, theirs, strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(*pair) for pair in zip(mine, theirs, strict=True))  # two ways indeed


def test_many_runs_of_lengths_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = related_rows(4)
    monkeypatch.setattr(lean_body, "few_runs", lambda bounds: [])
    mine = trained(qwen3(), batch)
    monkeypatch.setattr(packed, "lean_states", lambda *given: None)
    for own, other in zip(mine, trained(qwen3(), batch), strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-6)


def test_compiled_formulas_give_the_bits_of_plain_ones_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after torch.jit has seen them a few times and made its plans: a resumed run begins anew with those."""
    batch = related_rows(4)
    compiled = [trained(qwen3(), batch) for _ in range(4)]
    for name in (
        "_normed",
        "_norm_backward",
        "_crossed",
        "_heads",
        "_heads_backward",
        "_rest",
        "_rest_backward",
    ):
        if not isinstance(getattr(lean_layers, name), torch.jit.ScriptFunction):
            pytest.skip("torch.jit is not to be had here")
    monkeypatch.setattr(torch.jit, "script", _refuse)
    source = lean_layers.__file__
    plain: dict[str, Any] = {"__name__": "plain_lean_layers", "__file__": source}
    with open(source) as handle:
        exec(compile(handle.read(), source, "exec"), plain)
    for part in ("Heads", "Norm", "Rest"):
        monkeypatch.setattr(lean_body, part, plain[part])
    for run in (*compiled, trained(qwen3(), batch)):
        assert all(torch.equal(*pair) for pair in zip(run, compiled[0], strict=True))


def _refuse(formula: Any) -> Any:
    raise RuntimeError("not to be had in this Python")


def biased() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    return Qwen2ForCausalLM(config)


def hooked() -> PreTrainedModel:
    model = qwen3()
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, states: None)
    return model


def checkpointed() -> PreTrainedModel:
    model = qwen3()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def adapted() -> PreTrainedModel:
    model = qwen3()
    switch_off_dropout(model)
    add_lora(model, LoraSettings(rank=2))
    return model


OTHERS = {
    "biases": biased,
    "hooks": hooked,
    "windows": windowed,
    "checkpointing": checkpointed,
    "adapters": adapted,
    "half precision": lambda: qwen3(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_take_transformers_way(name: str) -> None:
    assert not lean_body.is_known(OTHERS[name]().get_decoder())


def test_large_models_take_transformers_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_body, "SMALL", 1000)
    assert not lean_body.is_known(qwen3().model)
