"""Decode attention over rows that are divided into parts, which is done for few long rows on a GPU."""

import asyncio
import os
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import EOS, engine_over, make_model, make_requests

from understudy.engines.base import Generation, Sampling
from understudy.engines.local.engine import CacheLayout
from understudy.engines.local.kernels import attention
from understudy.engines.local.kernels.attention import parts_for, slot_attention, slot_attention_plain
from understudy.engines.local.kv_pool import KeyValues, KVFormat, narrowed

LENGTHS = (1, 64, 127, 128, 129, 500, 700)
"""Rows of one part, of exactly one part, and of several with a last one of one column."""


def long_rows(
    queries: int,
    heads: int,
    size: int,
    kv_format: KVFormat,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    lengths: tuple[int, ...] = LENGTHS,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(queries)
    rows, columns = len(lengths), max(lengths) + 5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    keys, values = normal(rows + 1, heads, columns, size), normal(rows + 1, heads, columns, size)
    for row, length in enumerate(lengths):
        keys[rows - row, :, length:], values[rows - row, :, length:] = torch.nan, torch.nan
    keys[0], values[0] = torch.nan, torch.inf  # a slot that no row uses
    pool = KeyValues(keys, values)
    if kv_format is KVFormat.FP8:
        (narrow_keys, key_scales), (narrow_values, value_scales) = narrowed(keys), narrowed(values)
        pool = KeyValues(narrow_keys, narrow_values, key_scales, value_scales)
    return {
        "query_BQD": normal(rows, queries, size),
        "pool": pool,
        "slots_B": torch.arange(rows, 0, -1, device=device),
        "lengths_B": torch.tensor(lengths, device=device),
        "scale": size**-0.5,
    }


def rows_at(rows: dict[str, Any], places: list[int]) -> dict[str, Any]:
    names = ("query_BQD", "slots_B", "lengths_B")
    return {name: value[places] if name in names else value for name, value in rows.items()}


@pytest.mark.skipif(
    attention.triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="run by tests/contract/test_interpreted_kernels.py",
)
@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize(("window", "parts"), [(0, 2), (300, 8)])  # all four on a GPU: seconds each here
def test_attention_over_divided_rows_equals_plain_attention_in_triton_s_interpreter(
    kv_format: KVFormat, window: int, parts: int
) -> None:
    rows = long_rows(6, 2, 16, kv_format)
    tolerance = 1e-5 if kv_format is KVFormat.MODEL else 2e-3  # of fp16
    whole = slot_attention(**rows, window=window, parts=parts)
    torch.testing.assert_close(
        whole, slot_attention_plain(**rows, window=window), atol=tolerance, rtol=tolerance
    )
    alone = slot_attention(**rows_at(rows, [6]), window=window, parts=parts)
    assert torch.equal(alone[0], whole[6]), "a row's bits do not depend on the lengths of other rows"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(("queries", "heads", "size"), [(12, 2, 128), (16, 8, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_divided_rows_equals_plain_attention_on_a_gpu(
    kv_format: KVFormat, window: int, queries: int, heads: int, size: int, dtype: torch.dtype
) -> None:
    rows = long_rows(queries, heads, size, kv_format, "cuda", dtype, (*LENGTHS, 9000))
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5 if kv_format is KVFormat.MODEL else 2e-3
    expected = slot_attention_plain(**rows, window=window)
    for parts in (2, 16, 32):
        whole = slot_attention(**rows, window=window, parts=parts)
        torch.testing.assert_close(whole, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(slot_attention(**rows, window=window, parts=parts), whole)
        some = slot_attention(**rows_at(rows, [6, 2]), window=window, parts=parts)
        assert torch.equal(some, whole[[6, 2]])


def test_rows_are_divided_only_if_they_are_few_and_long() -> None:
    h200 = 132
    assert parts_for(16, 2, 1023, h200) == 1, "short rows"
    assert parts_for(128, 2, 32_000, h200) == 1, "enough rows for every multiprocessor"
    assert parts_for(4, 2, 32_000, h200) == 32
    assert parts_for(16, 2, 32_000, h200) == 8
    assert parts_for(16, 8, 1024, h200) == 2
    assert parts_for(300, 8, 32_000, h200) == 1


@pytest.mark.skipif(attention.triton is None, reason="triton is not installed")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_are_the_same_when_rows_become_long_enough_to_be_divided(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step with divided rows takes over at the twelfth token of the longest row."""
    longest_rows: list[int] = []

    def divided_from_twelve(rows: int, heads: int, longest: int, processors: int) -> int:
        longest_rows.append(longest)
        return 1 if longest < 12 else 4

    requests = make_requests(6, Sampling(20, (EOS,)), longest=5)

    def generated(layout: CacheLayout, device: str) -> list[Generation]:
        async def body() -> list[Generation]:
            async with engine_over(make_model("qwen3-16"), layout=layout, device=device) as engine:
                return await engine.generate(requests)

        return asyncio.run(body())

    expected = generated(CacheLayout.PADDED, "cpu")
    monkeypatch.setattr(attention, "parts_for", divided_from_twelve)
    monkeypatch.setattr(attention, "SHORTEST_PART", 1)
    for one, other in zip(expected, generated(CacheLayout.SLOTS, device), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.stop_reason is other.stop_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4 if device == "cuda" else 2e-5)
    assert min(longest_rows) < 12 < max(longest_rows)
