"""The engine's kernels with nan and inf: they do not affect other rows, nor do parts of the pool that no row uses."""

import pytest
import torch

from understudy.engines.local.kernels.attention import slot_attention, slot_attention_plain
from understudy.engines.local.kernels.fused import place_heads, silu_times
from understudy.engines.local.kernels.rms_norm import rms_norm
from understudy.engines.local.kv_pool import KeyValues

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BROKEN = [float("nan"), float("inf"), -float("inf")]
LOOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", BROKEN)
def test_a_row_with_nan_or_inf_does_not_change_other_rows_in_norms_and_gates(
    dtype: torch.dtype, broken: float
) -> None:
    x, up, weight = normal(5, 96, dtype=dtype), normal(5, 96, dtype=dtype, seed=1), normal(96, dtype=dtype)
    whole_norm, whole_gate = rms_norm(x, weight, 1e-6), silu_times(x, up)
    torch.testing.assert_close(whole_norm, plain_norm(x, weight), atol=LOOSE[dtype], rtol=LOOSE[dtype])
    with_broken_value = x.clone()
    with_broken_value[2, 7] = broken
    others = [0, 1, 3, 4]
    found_norm, found_gate = rms_norm(with_broken_value, weight, 1e-6), silu_times(with_broken_value, up)
    assert torch.equal(found_norm[others], whole_norm[others])
    assert torch.equal(found_gate[others], whole_gate[others])
    plain_gate = torch.nn.functional.silu(with_broken_value) * up
    torch.testing.assert_close(found_gate, plain_gate, atol=LOOSE[dtype], rtol=LOOSE[dtype], equal_nan=True)
    assert not torch.isfinite(found_norm[2]).all(), "the broken row should stay non-finite"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_large_values_is_computed_in_float32(dtype: torch.dtype) -> None:
    """The square of 60,000 overflows float16."""
    x, weight = normal(3, 64, dtype=dtype).sign() * 60_000, torch.ones(64, device=DEVICE, dtype=dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), x.sign(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_slot_or_in_unused_columns_does_not_change_other_rows_of_attention(
    dtype: torch.dtype,
) -> None:
    slots_B, ends_B = (torch.tensor(values, device=DEVICE) for values in ([3, 0, 2], [5, 64, 1]))
    query = normal(3, 4, 64, dtype=dtype)
    keys, values = normal(5, 2, 70, 64, dtype=dtype, seed=1), normal(5, 2, 70, 64, dtype=dtype, seed=2)
    whole = slot_attention(query, KeyValues(keys, values), slots_B, ends_B, 0.125, 0)
    plain = slot_attention_plain(query, KeyValues(keys, values), slots_B, ends_B, 0.125, 0)
    torch.testing.assert_close(whole, plain, atol=LOOSE[dtype], rtol=LOOSE[dtype])
    # Columns behind a row's end, and slots that no row uses, may hold anything.
    keys[3, :, 5:], values[3, :, 5:] = torch.nan, torch.nan
    keys[1], values[1], keys[4], values[4] = torch.nan, torch.inf, -torch.inf, torch.nan
    assert torch.equal(slot_attention(query, KeyValues(keys, values), slots_B, ends_B, 0.125, 0), whole)
    keys[0, :, 3] = torch.nan
    found = slot_attention(query, KeyValues(keys, values), slots_B, ends_B, 0.125, 0)
    assert torch.equal(found[[0, 2]], whole[[0, 2]]) and found[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_place_heads_writes_one_column_of_each_rows_slot(dtype: torch.dtype) -> None:
    slots_B, lengths_B = (torch.tensor(values, device=DEVICE) for values in ([3, 0], [4, 9]))
    query, key = normal(2, 4, 64, dtype=dtype), normal(2, 2, 64, dtype=dtype, seed=1)
    value, angles = normal(2, 2, 64, dtype=dtype, seed=2), normal(2, 32, dtype=torch.float32, seed=3)
    angles = torch.cat([angles, angles], -1)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    keys, values = (torch.full((5, 2, 10, 64), 7.0, device=DEVICE, dtype=dtype) for _ in range(2))
    norms = normal(64, dtype=dtype, seed=4), normal(64, dtype=dtype, seed=5)
    turned = place_heads(
        query, key, value, norms, 1e-6, cosine, sine, slots_B, lengths_B, KeyValues(keys, values)
    )

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = plain_norm(x, weight)
        first, second = normed.chunk(2, -1)
        return normed * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]

    torch.testing.assert_close(turned, rotated(query, norms[0]), atol=LOOSE[dtype], rtol=LOOSE[dtype])
    torch.testing.assert_close(
        keys[slots_B, :, lengths_B], rotated(key, norms[1]), atol=LOOSE[dtype], rtol=LOOSE[dtype]
    )
    assert torch.equal(values[slots_B, :, lengths_B], value)
    for pool in (keys, values):
        assert int((pool != 7.0).any(-1).any(1).sum()) == 2, "no other column was written"
