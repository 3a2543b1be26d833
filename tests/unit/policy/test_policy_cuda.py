"""CUDA only: attention kernels compared with plain implementations, and the device of the optimizer's tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_student import cross_entropy, qwen3, settings, token_mean, varied_batch
from transformers import Qwen3Config

from understudy.nn.grouped_attention import (
    HOPPER,
    NO_GROUPS,
    grouped_attention,
    in_groups,
    takes_groups,
)
from understudy.policy.forward.attention import _flash, rows_side_by_side
from understudy.policy.microbatch import Layout
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.policy import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_flash_attention_kernel_equals_the_plain_implementation(
    window: int | None, kv_heads: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = [1, 17, 64, 3, 40]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
    total = sum(lengths)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(heads, total, 32, device="cuda", generator=generator, dtype=torch.bfloat16)

    query, key, value, slope = draw(4), draw(kv_heads), draw(kv_heads), draw(4).transpose(0, 1)
    results = []
    for kernel, dtype in ((_flash, torch.bfloat16), (rows_side_by_side, torch.float64)):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (query, key, value)]
        out = kernel(*leaves, bounds, max(lengths), 0.2, window)
        (out * slope.to(dtype)).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for fast, plain in zip(*results, strict=True):
        assert (fast.double() - plain).abs().max() < 3e-2 * max(1.0, plain.abs().max().item())


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (16, 8, 128), (9, 3, 64)])
def test_grouped_attention_on_cuda_equals_float64_on_a_cpu(
    heads: int, kv_heads: int, size: int, grouped: bool
) -> None:
    """cuDNN's kernels on rows of equal length, FlashAttention without groups; forward and backward."""
    generator = torch.Generator("cuda").manual_seed(1)
    lengths = [640] * 5 + [128, 64]
    groups = in_groups(np.array(lengths))
    assert groups is not None
    bounds = torch.from_numpy(groups.bounds).cuda()
    table = torch.from_numpy(groups.table_G3) if grouped else NO_GROUPS

    def draw(count: int) -> torch.Tensor:
        # As a layer passes it: heads first, as a transposed view of the packed line.
        whole = torch.randn(count, sum(lengths), size, device="cuda", generator=generator)
        return whole.to(torch.bfloat16).transpose(0, 1)

    parts, slope = [draw(count) for count in (heads, kv_heads, kv_heads)], draw(heads)
    found = []
    for dtype, arguments in (
        (torch.bfloat16, (table, bounds)),
        (torch.float64, (table.clone(), bounds.cpu())),
    ):
        device = "cuda" if dtype == torch.bfloat16 else "cpu"
        leaves = [part.to(device, dtype).requires_grad_() for part in parts]
        mixed, _ = grouped_attention(*leaves, *arguments, 640, size**-0.5, True)
        found.append([mixed, *torch.autograd.grad(mixed, leaves, slope.to(device, dtype))])
    for fast, plain in zip(*found, strict=True):
        assert (fast.cpu().double() - plain).norm() < 8e-3 * plain.norm()


def test_grouped_attention_is_used_on_hopper_and_later_gpus() -> None:
    """A run without it only warns and is slower, so this test must show it."""
    new_enough = torch.cuda.get_device_capability()[0] >= HOPPER
    config = Qwen3Config(num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    for learns in (False, True):
        found = takes_groups(torch.device("cuda", 0), torch.bfloat16, config, learns=learns)
        assert found == new_enough


def test_the_packed_layout_is_the_default_on_cuda_and_equals_the_padded_one() -> None:
    batch = varied_batch(rows=40)
    found = {}
    for layout in (None, Layout.PADDED):
        policy = Policy(qwen3(dtype=torch.bfloat16).cuda(), settings(layout=layout))
        result = policy.update(batch, cross_entropy, token_mean(batch), 128)
        found[policy.layout] = (result.loss, policy.logprobs(batch).values)
    reference = Policy(qwen3().cuda(), settings()).update(batch, cross_entropy, token_mean(batch), 128).loss
    assert set(found) == set(Layout)
    for loss, _ in found.values():
        assert loss == pytest.approx(reference, rel=1e-2)
    packed, padded = (found[layout][1] for layout in Layout)
    assert (packed - padded).abs().mean() < 3e-2


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_state_that_is_saved_and_loaded_on_cuda_gives_the_same_next_step(
    dtype: torch.dtype, offload: bool
) -> None:
    """The step after a restart equals the step without one, with the optimizer's tensors on the GPU or on the host."""
    ways = settings(adamw=AdamWSettings(weight_decay=0.1, offload=offload), layout=Layout.PADDED)
    first = Policy(qwen3(dtype=dtype).cuda(), ways)
    batch = varied_batch()
    first.update(batch, cross_entropy, token_mean(batch), 64)
    second = Policy(qwen3(seed=4, dtype=dtype).cuda(), ways)
    second.load_state(first.state().detached())
    losses = [policy.update(batch, cross_entropy, token_mean(batch), 64).loss for policy in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-3)
