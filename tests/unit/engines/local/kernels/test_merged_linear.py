"""Linear layers over the same input, merged into one product: only the place of their weights in memory changes."""

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from understudy.engines.local.kernels.merged_linear import MergedLinear, as_one, lay_side_by_side


def three_linears(bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, out, bias=bias) for out in (8, 4, 4)]


def test_a_merged_linear_equals_its_parts_and_keeps_their_parameters(tmp_path) -> None:
    for bias in (False, True):
        linears = three_linears(bias)
        before = [one.weight.detach().clone() for one in linears]
        parameters = [one.weight for one in linears]
        states = torch.randn(5, 6)
        expected = [one(states) for one in linears]
        assert MergedLinear(linears)._apart is not None, (
            "separate products until the weights are adjacent in memory"
        )
        lay_side_by_side(linears)
        merged = MergedLinear(linears)
        assert merged._apart is None
        for found, wanted in zip(merged(states), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        assert all(one.weight is parameter for one, parameter in zip(linears, parameters, strict=True))
        assert all(torch.equal(one.weight, old) for one, old in zip(linears, before, strict=True))
        with torch.no_grad():
            linears[1].weight.fill_(2.0)
        torch.testing.assert_close(merged(states)[1], linears[1](states), msg="an update in place is seen")
        save_file({str(i): one.weight.detach() for i, one in enumerate(linears)}, tmp_path / "w.safetensors")
        kept = load_file(tmp_path / "w.safetensors")
        assert all(torch.equal(kept[str(i)], one.weight) for i, one in enumerate(linears))


def test_linears_with_adjacent_weights_get_the_same_gradients_as_separate_ones() -> None:
    linears, twins = three_linears(False), three_linears(False)
    lay_side_by_side(linears)
    states = torch.randn(5, 6)
    for one in (linears, twins):
        sum(linear(states).square().sum() for linear in one).backward()
    assert all(torch.equal(a.weight.grad, b.weight.grad) for a, b in zip(linears, twins, strict=True))


def test_as_one_returns_none_for_tensors_that_are_not_adjacent_in_memory() -> None:
    block = torch.randn(12, 6)
    assert as_one([block[:4], block[4:]]) is not None
    assert as_one([block[4:], block[:4]]) is None
    assert as_one([block[:4], block[5:]]) is None
    assert as_one([block[:4], torch.randn(4, 6)]) is None
    assert as_one([None, None]) is None
    mixed = [nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False, dtype=torch.float64)]
    lay_side_by_side(mixed)
    assert as_one([one.weight for one in mixed]) is None
