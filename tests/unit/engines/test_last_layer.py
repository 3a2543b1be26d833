"""The last layer's feed-forward part, only where it is read: the same states and gradients, and nothing left behind."""

from typing import Any

import pytest
import torch
from engine_models import VOCAB, make_model

from understudy.engines.last_layer import LastLayer, last_layer_of

IDS_BL = torch.randint(0, VOCAB, (5, 9), generator=torch.Generator().manual_seed(0))
PLACES_N = torch.tensor([3, 8, 9, 21, 30, 44])


def states_and_gradients(model: Any, last: LastLayer | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """States at the places, and the gradients of a loss that reads only these."""
    model.zero_grad()
    seen: list[int] = []
    counter = model.model.layers[-1].mlp.act_fn.register_forward_hook(
        lambda _module, _inputs, out: seen.append(out.shape[:-1].numel())
    )
    if last is None:
        states = model.model(input_ids=IDS_BL, use_cache=False).last_hidden_state
        assert seen == [IDS_BL.numel()]
    else:
        with last.read_only_at(PLACES_N, IDS_BL.numel()):
            states = model.model(input_ids=IDS_BL, use_cache=False).last_hidden_state
        assert seen == [len(PLACES_N)]
    counter.remove()
    found_NH = states.flatten(0, 1)[PLACES_N]
    found_NH.square().sum().backward()
    return found_NH.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_states_and_gradients_are_those_of_the_whole_pass(family: str) -> None:
    model = make_model(family).train()
    last = LastLayer(model.model)
    assert last.can_be_cut
    whole, expected = states_and_gradients(model, None)
    found, gradients = states_and_gradients(model, last)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5 * max(scale, 1.0), rtol=1e-4)
    again, _ = states_and_gradients(model, None)
    assert torch.equal(again, whole), "nothing may stay on the model"


def test_a_layer_that_looks_at_other_positions_is_left_alone() -> None:
    mixing = make_model("qwen3")
    mixing.model.layers[-1].mlp.register_forward_hook(
        lambda _module, _inputs, out: out + out.mean(1, keepdim=True)
    )
    last = LastLayer(mixing.model)
    assert not last.can_be_cut
    expected = mixing.model(input_ids=IDS_BL, use_cache=False).last_hidden_state
    with last.read_only_at(PLACES_N, IDS_BL.numel()):
        assert torch.equal(mixing.model(input_ids=IDS_BL, use_cache=False).last_hidden_state, expected)


def test_a_body_without_such_a_layer_is_left_alone() -> None:
    body = make_model("llama").model
    del body.layers[-1].mlp
    assert not LastLayer(body).can_be_cut
    assert not LastLayer(torch.nn.Linear(2, 2)).can_be_cut


def test_nothing_is_picked_out_where_nearly_everything_is_read() -> None:
    model = make_model("llama")
    last = last_layer_of(model.model)
    assert last_layer_of(model.model) is last
    everywhere = torch.arange(IDS_BL.numel())
    with torch.no_grad():
        whole = model.model(input_ids=IDS_BL, use_cache=False).last_hidden_state
        with last.read_only_at(everywhere, IDS_BL.numel()):
            assert torch.equal(model.model(input_ids=IDS_BL, use_cache=False).last_hidden_state, whole)


def test_a_compiled_layer_is_left_alone() -> None:
    body = make_model("llama").model
    last = LastLayer(body)
    assert last.can_be_cut
    body.layers[-1].compile(backend="eager")
    assert not last.can_be_cut
