"""Rows in slots get the same tokens as rows padded to one length, and the kernels equal plain torch."""

import asyncio
import gc
import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import EOS, engine_over, logprobs_over_kept_cache, make_model, make_requests, tokens_drawn

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local import slots
from understudy.engines.local.engine import CacheLayout
from understudy.engines.local.kernels import attention as decode_attention
from understudy.engines.local.kernels.attention import kernel_fits, slot_attention, slot_attention_plain
from understudy.engines.local.kernels.rms_norm import rms_norm
from understudy.engines.local.kv_pool import KeyValues, KVFormat, narrowed
from understudy.engines.local.scheduler import Batching
from understudy.engines.local.slots import MODEL_TYPES, SlotPool, garbage_collection_off
from understudy.errors import EngineError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
needs_triton = pytest.mark.skipif(decode_attention.triton is None, reason="triton is not installed")


def run(model: Any, requests: list[GenerateRequest], **settings: Any) -> list[Generation]:
    async def body() -> list[Generation]:
        async with engine_over(model, **settings) as engine:
            return await engine.generate(requests)

    return asyncio.run(body())


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_batch", [64, 5])
def test_rows_in_slots_get_the_same_tokens_as_padded_rows(device: str, max_batch: int) -> None:
    model = make_model("qwen3-16")
    requests = make_requests(16, Sampling(20, (EOS,)))
    padded = run(make_model("qwen3-16"), requests, layout=CacheLayout.PADDED)
    for a, b in zip(
        padded,
        run(model, requests, layout=CacheLayout.SLOTS, device=device, max_batch=max_batch),
        strict=True,
    ):
        assert a.tokens.tolist() == b.tokens.tolist() and a.stop_reason is b.stop_reason
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4 if device == "cuda" else 2e-5)


@needs_triton
@pytest.mark.parametrize("batching", list(Batching))
def test_queueing_a_step_ahead_changes_no_tokens(monkeypatch: pytest.MonkeyPatch, batching: Batching) -> None:
    """Rows that end by a stop id or by length, and rows that enter while others are generated."""
    requests = [
        *make_requests(9, Sampling(20, (EOS,))),
        *make_requests(6, Sampling(7), seed=4),
        *make_requests(1, Sampling(1), seed=5),
    ]
    settings = {"layout": CacheLayout.SLOTS, "max_batch": 5, "batching": batching}
    plain = run(make_model("qwen3-16"), requests, **settings)
    monkeypatch.setattr(slots, "RUN_AHEAD", {"cpu"})
    ahead = run(make_model("qwen3-16"), requests, **settings)
    for one, other in zip(plain, ahead, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.stop_reason is other.stop_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


@needs_triton
def test_slots_of_finished_and_aborted_rows_are_reused() -> None:
    model = make_model("qwen3-16")
    requests = make_requests(9, Sampling(6, (EOS,)))

    async def body() -> None:
        async with engine_over(model, layout=CacheLayout.SLOTS, max_batch=4) as engine:
            first = [g.tokens.tolist() for g in await engine.generate(requests)]
            for _ in range(3):
                task = asyncio.create_task(engine.generate(make_requests(4, Sampling(100), seed=5)))
                await asyncio.sleep(0.05)
                await engine.abort()
                await task
            assert [g.tokens.tolist() for g in await engine.generate(requests)] == first

    asyncio.run(body())


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_whose_slot_is_full_does_not_write_into_other_slots(device: str) -> None:
    """A finished row stays in its batch until dropping it pays. Its further steps must not write into other slots."""
    model = make_model("qwen3-16").to(device)
    pool = SlotPool(model, slots=3, max_length=8, device=torch.device(device))
    full, other = torch.tensor([0, 2], device=device), torch.tensor([1], device=device)
    with torch.inference_mode(), separate_stream(device):
        step = pool.step_for(2, 8)
        step.place(full, torch.tensor([6, 7], device=device))
        for _ in range(5):
            step.run(torch.tensor([5, 6], device=device))
    assert step._places.lengths_B[:2].tolist() == [7, 7]
    for layer in pool._layers:
        assert not layer.keys[other].any() and not layer.values[other].any()


def separate_stream(device: str) -> AbstractContextManager[Any]:
    """A separate stream, as an engine has; graphs cannot be recorded on the default one."""
    return nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream())


class Cycle:
    """Garbage that only the garbage collector can free."""

    def __init__(self, held: object) -> None:
        self.held, self.itself = held, self


def test_garbage_is_collected_before_but_not_while_a_step_is_recorded() -> None:
    class Old: ...

    before, during = Old(), Old()
    references = [weakref.ref(before), weakref.ref(during)]
    Cycle(before)
    del before
    with garbage_collection_off():
        assert references[0]() is None, "existing garbage is collected first"
        Cycle(during)
        del during
        for _ in range(3 * gc.get_threshold()[0]):  # more than enough to call the collector
            [].append([])
        assert references[1]() is not None
    assert gc.isenabled()
    gc.collect()
    assert references[1]() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_garbage_graphs_of_an_old_engine_do_not_break_the_recording_of_another() -> None:
    model = make_model("qwen3-16").to("cuda")
    with torch.inference_mode(), separate_stream("cuda"):

        def recorded() -> SlotPool:
            pool = SlotPool(model, slots=3, max_length=8, device=torch.device("cuda"))
            pool.step_for(2, 8)
            return pool

        Cycle(recorded())
        thresholds = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            step = recorded().step_for(2, 8)
        finally:
            gc.set_threshold(*thresholds)
        step.run(torch.tensor([5, 6], device="cuda"))
    assert torch.randn(3, device="cuda").isfinite().all(), (
        "the random generator is not left in recording mode"
    )


@needs_triton
def test_a_live_update_recomputes_the_keys_and_values_in_the_slots() -> None:
    old, new = make_model("qwen3-16", seed=0), make_model("qwen3-16", seed=1)
    requests = make_requests(4, Sampling(100))

    async def body() -> None:
        async with engine_over(
            make_model("qwen3-16"), layout=CacheLayout.SLOTS, max_batch=4, version=0
        ) as engine:
            task = asyncio.create_task(engine.generate(requests))
            await asyncio.sleep(0.1)
            await engine.update_weights(1, new.named_parameters())
            for request, generation in zip(requests, await task, strict=True):
                switch = int((generation.weight_versions == 0).sum())
                for start, end, model in ((0, switch, old), (switch, 100, new)):
                    ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens[:end].tolist()]])
                    with torch.no_grad():
                        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
                    at = len(request.tokens) + start
                    expected = logprobs[at - 1 : -1].gather(1, ids[0, at:, None])[:, 0].numpy()
                    np.testing.assert_allclose(generation.logprobs[start:end], expected, atol=2e-5)

    asyncio.run(body())


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_without_recompute_kv_an_update_keeps_the_keys_and_values_in_the_slots(device: str) -> None:
    old, new = make_model("qwen3-16", seed=0), make_model("qwen3-16", seed=1)
    requests = make_requests(4, Sampling(100))

    async def body() -> None:
        settings = {"layout": CacheLayout.SLOTS, "max_batch": 4, "version": 0, "recompute_kv": False}
        async with engine_over(make_model("qwen3-16"), device=device, **settings) as engine:
            task = asyncio.create_task(engine.generate(requests))
            await tokens_drawn(engine, 5)
            await engine.update_weights(1, new.named_parameters())
            for request, generation in zip(requests, await task, strict=True):
                switch = int((generation.weight_versions == 0).sum())
                assert 0 < switch < 100
                assert generation.weight_versions.tolist() == [0] * switch + [1] * (100 - switch)
                expected = logprobs_over_kept_cache(old, new, request, generation, switch)
                np.testing.assert_allclose(
                    generation.logprobs, expected, atol=1e-4 if device == "cuda" else 2e-5
                )

    asyncio.run(body())


def random_pool(
    rows: int,
    queries: int,
    heads: int,
    size: int,
    columns: int,
    device: str,
    dtype: torch.dtype,
    kv_format: KVFormat = KVFormat.MODEL,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows * columns + size)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    slots = torch.randperm(rows + 3, generator=generator)[:rows]
    keys, vals = values(rows + 3, heads, columns, size), values(rows + 3, heads, columns, size)
    lengths = torch.randint(1, columns + 1, (rows,), generator=generator)
    vals *= 1e-4 ** torch.rand(vals.shape[:3], generator=generator)[..., None].to(device, dtype)
    for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
        vals[slot, :, length:] = torch.nan  # what is beyond a row's length must not matter
        keys[slot, :, length:] = torch.nan
    pool = KeyValues(keys, vals)
    if kv_format is KVFormat.FP8:
        (narrow_keys, key_scales), (narrow_values, value_scales) = narrowed(keys), narrowed(vals)
        pool = KeyValues(narrow_keys, narrow_values, key_scales, value_scales)
    return {
        "query_BQD": values(rows, queries, size),
        "pool": pool,
        "slots_B": slots.to(device),
        "lengths_B": lengths.to(device),
        "scale": size**-0.5,
    }


SHAPES = [(3, 4, 2, 16, 70), (5, 8, 8, 32, 130), (2, 14, 2, 64, 64), (4, 16, 8, 128, 200)]


@pytest.mark.parametrize(("rows", "queries", "heads", "size", "columns"), SHAPES)
@pytest.mark.parametrize("window", [0, 9])
def test_plain_slot_attention_equals_a_loop_over_rows_and_heads_in_fp64(
    rows: int, queries: int, heads: int, size: int, columns: int, window: int
) -> None:
    pool = random_pool(rows, queries, heads, size, columns, "cpu", torch.float32)
    result = slot_attention_plain(**pool, window=window)
    for row in range(rows):
        slot, length = int(pool["slots_B"][row]), int(pool["lengths_B"][row])
        first = max(0, length - window) if window else 0
        for query in range(queries):
            head = query // (queries // heads)
            keys = pool["pool"].keys_SHCD[slot, head, first:length].double()
            scores = keys @ pool["query_BQD"][row, query].double() * pool["scale"]
            expected = scores.softmax(-1) @ pool["pool"].values_SHCD[slot, head, first:length].double()
            torch.testing.assert_close(result[row, query].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_keys_and_values_are_off_by_at_most_a_sixteenth(device: str) -> None:
    """Vectors of every magnitude, with a row of zeros and a single large number among them."""
    generator = torch.Generator().manual_seed(3)
    vectors_NHD = (
        torch.randn((40, 2, 32), generator=generator) * 10 ** torch.linspace(-12, 6, 40)[:, None, None]
    )
    vectors_NHD[7], vectors_NHD[8, 0, 3] = 0.0, 1e4
    vectors_NHD = vectors_NHD.to(device)
    pool = KeyValues.empty((3, 2, 20, 32), KVFormat.FP8, torch.bfloat16, torch.device(device))
    slots_N, columns_N = torch.arange(40, device=device) % 3, torch.arange(40, device=device) // 3
    pool.write(slots_N, columns_N, vectors_NHD, -vectors_NHD)
    keys_NHD, values_NHD = pool.read(slots_N, columns_N, torch.float32)
    tops_NH1 = vectors_NHD.abs().amax(-1, keepdim=True)
    # The smallest steps of e4m3 are 2^-9 where the largest number is 448.
    assert ((keys_NHD - vectors_NHD).abs() <= vectors_NHD.abs() / 16 + tops_NH1 / 448 / 512).all()
    assert torch.equal(values_NHD, -keys_NHD) and not keys_NHD[7].any()


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_with_an_fp8_kv_cache_are_close_to_the_models(device: str) -> None:
    """The engine's log-probabilities and the model's own for the same tokens are close, and not equal."""
    requests = make_requests(16, Sampling(20, (EOS,)))
    model = make_model("qwen3-16")
    written = run(model, requests, layout=CacheLayout.SLOTS, device=device, kv_format=KVFormat.FP8)
    off = []
    for request, generation in zip(requests, written, strict=True):
        ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens.tolist()]])
        with torch.no_grad():
            logprobs = make_model("qwen3-16")(input_ids=ids).logits[0].log_softmax(-1)
        at = len(request.tokens)
        expected = logprobs[at - 1 : -1].gather(1, ids[0, at:, None])[:, 0].numpy()
        off.extend(np.abs(generation.logprobs - expected).tolist())
    assert 1e-5 < np.mean(off) < 0.05 and np.max(off) < 0.3


def test_an_fp8_kv_cache_is_refused_without_slots() -> None:
    with pytest.raises(
        EngineError, match=r"need the kernels of a GPU, this engine runs on cpu; leave out\s+rollout.kv_cache"
    ):
        run(make_model("qwen3-16"), make_requests(1, Sampling(2)), kv_format=KVFormat.FP8)
    with pytest.raises(EngineError, match="cannot keep keys and values in fp8"):
        run(
            make_model("gemma3"),
            make_requests(1, Sampling(2)),
            layout=CacheLayout.SLOTS,
            kv_format=KVFormat.FP8,
        )


@pytest.mark.skipif(
    decode_attention.triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="run by tests/contract/test_interpreted_kernels.py",
)
def test_the_attention_and_norm_kernels_equal_plain_torch_in_triton_s_interpreter() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for features in (16, 96):
        norm = Qwen3RMSNorm(features, eps=1e-6)
        torch.nn.init.normal_(norm.weight)
        x = torch.randn(3, 2, 5, features).transpose(1, 2)
        found = rms_norm(x, norm.weight.detach(), 1e-6)
        torch.testing.assert_close(found, norm(x).detach(), atol=1e-6, rtol=1e-5)
    for shape, window, kv_format in (
        (SHAPES[0], 9, KVFormat.MODEL),
        (SHAPES[2], 0, KVFormat.MODEL),
        (SHAPES[0], 0, KVFormat.FP8),
        (SHAPES[2], 9, KVFormat.FP8),
    ):
        pool = random_pool(*shape, "cpu", torch.float32, kv_format)
        expected = slot_attention_plain(**pool, window=window)
        tolerance = 1e-5 if kv_format is KVFormat.MODEL else 2e-3  # of fp16
        torch.testing.assert_close(
            slot_attention(**pool, window=window), expected, atol=tolerance, rtol=tolerance
        )


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "queries", "heads", "size", "columns"), SHAPES)
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_the_slot_attention_kernel_equals_plain_torch_on_a_gpu(
    rows: int,
    queries: int,
    heads: int,
    size: int,
    columns: int,
    window: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
) -> None:
    pool = random_pool(rows, queries, heads, size, columns, "cuda", dtype, kv_format)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5 if kv_format is KVFormat.MODEL else 2e-3
    torch.testing.assert_close(
        slot_attention(**pool, window=window),
        slot_attention_plain(**pool, window=window),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("features", [64, 128, 1024, 2560])
def test_the_fused_norm_equals_transformers_on_a_gpu(features: int) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm = Qwen3RMSNorm(features).to("cuda", torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 3, features, device="cuda", dtype=torch.bfloat16)
    different = (rms_norm(x, norm.weight.detach(), norm.variance_epsilon) != norm(x)).float().mean()
    assert different < 0.01, (
        "the same roundings: a sum in another order moves a value by one bit now and then"
    )


def test_only_models_with_plain_attention_get_slots() -> None:
    assert "qwen3" in MODEL_TYPES and "gemma3_text" not in MODEL_TYPES
    assert not kernel_fits(4, 2, 24) and not kernel_fits(6, 4, 64)
    with pytest.raises(EngineError, match="cannot be decoded over slots"):
        run(make_model("gemma3"), make_requests(1, Sampling(2)), layout=CacheLayout.SLOTS)
