"""What loading a student does besides reading its files: router noise, missing weights, long texts."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Family, make
from small_runs import ASSETS
from transformers import AutoTokenizer

from understudy.errors import PolicyError
from understudy.policy.load import load_student, load_tokenizer, switch_off_router_noise
from understudy.policy.supervised import SupervisedSchedule, pad_rows, train


def test_a_text_longer_than_the_context_is_encoded_without_a_warning(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers warns that running it "will result in indexing errors", but long tool results are truncated first."""
    tokenizer = load_tokenizer(str(ASSETS / "models" / "student"))
    assert len(tokenizer("12+34=" * 1000)["input_ids"]) > tokenizer.model_max_length
    assert "longer than" not in caplog.text + "".join(capfd.readouterr())


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NOISY = {
    "phimoe": ({**_EXPERTS, "router_jitter_noise": 0.01, "input_jitter_noise": 0.1}, "PhimoeSparseMoeBlock, PhimoeTopKRouter"),
    "phimoe-without-input-noise": ({**_EXPERTS, "router_jitter_noise": 0.01}, "PhimoeTopKRouter"),
    "mixtral": ({**_EXPERTS, "router_jitter_noise": 0.1}, "MixtralSparseMoeBlock"),
    "minimax": (
        {**_EXPERTS, "router_jitter_noise": 0.1, "layer_types": ["full_attention"] * 2},
        "MiniMaxSparseMoeBlock",
    ),
}  # fmt: skip
IDS = torch.arange(1, 33)[None]


def noisy(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind = name.partition("-")[0]
    monkeypatch.setitem(FAMILIES, "noisy", Family(kind, {"sliding_window": None, **NOISY[name][0]}))
    return make("noisy")


@pytest.mark.parametrize("name", NOISY)
def test_routers_add_no_noise_in_training_after_switch_off_router_noise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = noisy(name, monkeypatch)
    expected = model(input_ids=IDS).logits
    model.train()
    assert not torch.equal(model(input_ids=IDS).logits, expected), (
        "transformers adds no noise in training any more"
    )
    assert switch_off_router_noise(model) == NOISY[name][1].split(", ")
    for one in (model, copy.deepcopy(model)):
        one.eval()
        one.train()
        logits = one(input_ids=IDS).logits
        assert one.training and torch.equal(logits, expected)
        logits.square().sum().backward()
        routers = [weight for key, weight in one.named_parameters() if "router" in key or ".gate." in key]
        assert routers and all(weight.grad is not None and weight.grad.any() for weight in routers)


@pytest.mark.parametrize("name", NOISY)
def test_routers_add_no_noise_in_supervised_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [noisy(name, monkeypatch)]
    models.append(copy.deepcopy(models[0]))
    rows = pad_rows([(IDS[0].tolist(), [True] * IDS.shape[1])] * 2, 0)
    for model in models:  # torch's generator is not reset between the two
        train(model, {"all": rows}, SupervisedSchedule(2, {"all": 2}, seed=0))
    one, other = (model.state_dict() for model in models)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_load_student_switches_router_noise_off_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noisy("phimoe", monkeypatch).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ASSETS / "models" / "student").save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        model = load_student(str(tmp_path)).model
    message = "the noise that PhimoeSparseMoeBlock, PhimoeTopKRouter adds in training is off"
    assert model.training and caplog.text.count(message) == 1
    assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_models_without_router_noise_are_not_changed() -> None:
    for name in ("mixtral", "qwen3-moe"):
        model = make(name).train()
        assert switch_off_router_noise(model) == [] and all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": False}, r"its files lack the weights lm_head\.weight; download or copy"),
        ({"num_hidden_layers": 3}, r"its files lack the weights model\.layers\.2\..* \(and \d+ more\)"),
        ({"vocab_size": 200}, r"model\.embed_tokens\.weight has the shape \["),
    ],
)
def test_a_model_whose_files_do_not_hold_all_its_weights_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would initialize missing weights with random numbers."""
    monkeypatch.setitem(FAMILIES, "tied", Family("llama", {"tie_word_embeddings": True}))
    make("tied").save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ASSETS / "models" / "student").save_pretrained(tmp_path)
    load_student(str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(PolicyError, match=message) as error:
        load_student(str(tmp_path))
    assert "\n" not in str(error.value)
