"""Attention over groups of rows of one length: values, gradients, and its registration with the compiler."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from understudy.nn import grouped_attention as module
from understudy.nn.grouped_attention import NO_GROUPS, grouped_attention, in_groups, takes_groups

SCALE = 0.4


def random_states(
    lengths: Sequence[int],
    heads: int = 4,
    key_heads: int = 2,
    size: int = 8,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(sum(lengths), count, size, generator=generator, dtype=torch.float64).to(dtype)
        for count in (heads, key_heads, key_heads)
    )
    return query, key, value


def group_arguments(lengths: Sequence[int], grouped: bool) -> tuple[Tensor, Tensor, int]:
    """(table, bounds, longest)"""
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    if not grouped:
        return NO_GROUPS, bounds, max(lengths)
    groups = in_groups(np.array(lengths))
    assert groups is not None and groups.order_B.tolist() == list(range(len(lengths)))
    return torch.from_numpy(groups.table_G3), bounds, max(lengths)


def row_by_row(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat(
        [
            scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in row), is_causal=True, scale=SCALE, enable_gqa=True
            )[0].transpose(0, 1)
            for row in zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True)
        ]
    )


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_values_and_gradients_equal_those_of_each_row_alone(
    grouped: bool, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROUND", 4)
    lengths = [12, 12, 12, 12, 12, 8, 8, 4]
    parts, slope = random_states(lengths, key_heads=key_heads), random_states(lengths)[0]
    found = []
    for ours in (True, False):
        leaves = [part.clone().requires_grad_() for part in parts]
        mixed = (
            grouped_attention(*leaves, *group_arguments(lengths, grouped), SCALE, True)[0]
            if ours
            else row_by_row(*leaves, lengths)
        )
        found.append([mixed, *torch.autograd.grad(mixed, leaves, slope)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("grouped", [True, False])
def test_the_registered_operator_passes_torchs_opcheck(grouped: bool) -> None:
    """It checks shapes, strides, aliases and gradients, also with symbolic lengths."""
    lengths = [64, 64, 64]
    leaves = [part.requires_grad_() for part in random_states(lengths, dtype=torch.float32)]
    torch.library.opcheck(grouped_attention, (*leaves, *group_arguments(lengths, grouped), SCALE, True))


def test_a_gradient_through_a_call_with_learns_false_raises() -> None:
    leaves = [part.requires_grad_() for part in random_states([64])]
    with pytest.raises(RuntimeError, match="learns=False"):
        grouped_attention(*leaves, *group_arguments([64], True), SCALE, False)
    with torch.no_grad():
        mixed, sums = grouped_attention(*leaves, *group_arguments([64], True), SCALE, False)
    assert mixed.shape == (64, 4, 8) and sums.numel() == 0


def test_rows_are_rounded_up_and_ordered_longest_first() -> None:
    lengths = np.array([60, 190, 640, 639, 192, 640])
    groups = in_groups(lengths)
    assert groups is not None
    assert groups.filled_B.tolist() == [64, 192, 640, 640, 192, 640]
    assert groups.order_B.tolist() == [2, 3, 5, 1, 4, 0]
    assert groups.begins_B.tolist() == [2304, 1920, 0, 640, 2112, 1280]
    assert groups.table_G3[:4].tolist() == [[0, 3, 640], [1920, 2, 192], [2304, 1, 64], [0, 0, 0]]
    assert groups.bounds.tolist() == [0, 640, 1280, 1920, 2112, 2304, 2368] and groups.total == 2368


def test_short_rows_and_too_many_different_lengths_are_not_grouped() -> None:
    assert in_groups(np.array([20, 40, 60])) is None
    assert in_groups(np.arange(1, 66) * 64) is None


@pytest.mark.parametrize(
    ("rows", "groups"), [(1, [1]), (2, [2]), (3, [3]), (5, [4, 1]), (7, [6, 1]), (51, [48, 3]), (64, [64])]
)
def test_groups_have_only_a_few_different_sizes(rows: int, groups: list[int]) -> None:
    found = in_groups(np.full(rows, 128))
    assert found is not None
    assert [count for _, count, _ in found.table_G3.tolist() if count] == groups


def test_groups_are_not_used_on_a_cpu() -> None:
    assert not takes_groups(torch.device("cpu"), torch.bfloat16, None, learns=True)
