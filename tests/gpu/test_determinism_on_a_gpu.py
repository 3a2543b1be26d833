"""Attention on a GPU under `run.determinism = "full"`: repeated forward and backward passes give the same bits."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from understudy.nn.determinism import keep_to_repeatable
from understudy.nn.grouped_attention import NO_GROUPS, grouped_attention, in_groups, takes_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = np.array([1536, 1536, 1472, 1408, 1088, 1088, 1024])
HEADS, KEY_HEADS, SIZE = 16, 4, 128
TIMES = 12


@pytest.fixture
def repeatable() -> Iterator[None]:
    keep_to_repeatable(True, "cuda")
    yield
    keep_to_repeatable(False, "cuda")


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize(
    ("grouped", "learns"),
    [
        pytest.param(False, True, id="FlashAttention, forward and back"),
        pytest.param(True, False, id="cuDNN, forward"),
    ],
)
def test_repeated_attention_gives_the_same_bits(grouped: bool, learns: bool) -> None:
    groups = in_groups(LENGTHS)
    assert groups is not None
    table = torch.from_numpy(groups.table_G3) if grouped else NO_GROUPS
    bounds = torch.from_numpy(groups.bounds).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    query, slope = (drawn(HEADS, generator) for _ in range(2))
    key, value = (drawn(KEY_HEADS, generator) for _ in range(2))

    def compute() -> list[Tensor]:
        leaves = [one.clone().requires_grad_(learns) for one in (query, key, value)]
        mixed, _ = grouped_attention(*leaves, table, bounds, int(LENGTHS.max()), SIZE**-0.5, learns)
        return [mixed, *(torch.autograd.grad(mixed, leaves, slope) if learns else ())]

    first = compute()
    for _ in range(TIMES):
        assert all(torch.equal(one, other) for one, other in zip(first, compute(), strict=True))


@pytest.mark.usefixtures("repeatable")
def test_grouped_attention_is_not_used_for_training_under_full_determinism() -> None:
    config = LlamaConfig(hidden_size=HEADS * SIZE, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)
    assert not takes_groups(torch.device("cuda", 0), torch.bfloat16, config, learns=True)


def drawn(heads: int, generator: torch.Generator) -> Tensor:
    shape = (int(LENGTHS.sum()), heads, SIZE)
    return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)
