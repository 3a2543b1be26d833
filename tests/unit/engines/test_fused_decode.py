"""The fused kernels of the decode step equal transformers' arithmetic and the plain rule of drawing tokens."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import make_model

from understudy.engines.base import Sampling
from understudy.engines.local.kernels import decode_step as decode_loop
from understudy.engines.local.kernels import fused as fused_decode
from understudy.engines.local.kernels.draw import draw_unfiltered
from understudy.engines.local.kernels.fused import fuse_decoding, silu_times
from understudy.engines.local.kv_pool import KVFormat
from understudy.engines.local.sampling import SamplingBatch, draw, shape_logits
from understudy.engines.local.slots import SlotPool

interpreted = pytest.mark.skipif(
    fused_decode.triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="run by tests/contract/test_interpreted_kernels.py",
)


def check_decoding(kind: str, device: str, kv_format: KVFormat = KVFormat.MODEL) -> None:
    """Two steps over slots, with the kernels and without: the same logits, and the same keys and values in the pool."""
    model = make_model(kind).to(device)

    def twin() -> Any:
        other = make_model(kind).to(device)
        other.load_state_dict(model.state_dict())
        return other

    fused, looped, joined = twin(), twin(), twin()
    assert fuse_decoding(fused) == 2 * model.config.num_hidden_layers
    assert decode_loop.fits(joined)
    decode_loop.join_products(joined)
    expected = two_steps(model, device, False, kv_format)
    # In eight bits a last bit of difference may decide to which of two neighbours a number is rounded.
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if kv_format is KVFormat.MODEL else {"atol": 5e-3, "rtol": 0.13}
    for one, loop in ((fused, False), (looped, True), (joined, True)):
        for plain, found in zip(expected, two_steps(one, device, loop, kv_format), strict=True):
            torch.testing.assert_close(found, plain, **tolerance)


def two_steps(
    model: Any, device: str, loop: bool, kv_format: KVFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and the keys and values left in the pool."""
    pool = SlotPool(model, slots=3, max_length=8, device=torch.device(device), kv_format=kv_format)
    pool._loop = decode_loop.DecodeLoop(model) if loop else None
    places = pool.scratch_places(3)
    places.slots_B.copy_(torch.tensor([2, 0, 1]))
    logits = []
    with torch.inference_mode():
        for tokens in ([5, 6, 7], [8, 5, 5]):
            logits.append(pool.forward(torch.tensor(tokens, device=device), places).clone())
            places.lengths_B += torch.tensor([1, 2, 1], device=device)
    # Columns that were never written are zero in both.
    every = torch.arange(4, device=device)
    keys, values = zip(*(layer.pool.of_slots(every) for layer in pool._layers), strict=True)
    return torch.stack(logits), torch.stack(keys), torch.stack(values)


def check_drawing(device: str, vocab: int, dtype: torch.dtype) -> None:
    """Compares with the plain rule, greedy and tempered rows among others; u at both ends."""
    settings = [Sampling(3, (), temperature=t) for t in (1.0, 0.7, 0.0, 1.0, 2.5, 1.0)]
    generator = torch.Generator().manual_seed(vocab)
    logits_BV = (3 * torch.randn((len(settings), vocab), generator=generator)).to(dtype)
    logits_BV[3, : vocab // 2] = -torch.inf  # whole pieces that weigh nothing
    batch = SamplingBatch.build(settings, list(range(6)), [0] * 6, vocab, torch.device("cpu"))
    batch.uniforms_NB[2, 0], batch.uniforms_NB[2, 1] = 0.0, np.nextafter(1.0, 0.0)
    mine = SamplingBatch.build(settings, list(range(6)), [0] * 6, vocab, torch.device(device))
    mine.uniforms_NB.copy_(batch.uniforms_NB)
    for step in range(3):
        tokens_B, logprobs_B = draw(shape_logits(logits_BV, batch, None), batch, step)
        own_B, own_logprobs_B = draw_unfiltered(logits_BV.to(device), mine, step)
        assert own_B.tolist() == tokens_B.tolist()
        # Over 150,000 ids the fp32 sum of the plain rule is itself off by as much.
        torch.testing.assert_close(own_logprobs_B.cpu(), logprobs_B, atol=5e-5, rtol=5e-5)


def check_gate(device: str) -> None:
    gate, up = torch.randn(3, 5, 700, device=device), torch.randn(3, 5, 700, device=device)
    torch.testing.assert_close(silu_times(gate, up), torch.nn.functional.silu(gate) * up)


def check_prompts(kind: str, device: str) -> None:
    """Reads prompts of different lengths into slots out of order: logits and keys equal those of transformers for each
    row."""
    model = make_model(kind).to(device)
    pool = SlotPool(model, slots=3, max_length=8, device=torch.device(device))
    pool._loop = decode_loop.DecodeLoop(model)
    rows, slots = (
        [np.array(row, dtype=np.int32) for row in ([5, 6, 7, 8], [9], [5, 6, 3, 4, 2, 8])],
        [2, 0, 1],
    )
    with torch.inference_mode():
        found_BV = pool.read(slots, rows)
        for row, slot, found_V in zip(rows, slots, found_BV, strict=True):
            plain = model(input_ids=torch.from_numpy(row).long()[None].to(device), use_cache=True)
            torch.testing.assert_close(found_V, plain.logits[0, -1], atol=2e-5, rtol=1e-4)
            for layer, own in zip(pool._layers, plain.past_key_values.layers, strict=True):
                for kept, wanted in ((layer.keys, own.keys), (layer.values, own.values)):
                    torch.testing.assert_close(kept[slot, :, : len(row)], wanted[0], atol=2e-5, rtol=1e-4)
                    assert not kept[slot, :, len(row) :].any()


CASES = [(100, torch.float32), (5000, torch.float32), (6144, torch.bfloat16)]


@interpreted
def test_the_fused_decode_kernels_equal_transformers_in_triton_s_interpreter() -> None:
    """FP8 is tested only on a GPU: the interpreter loses the carry when it rounds to eight bits (31.2 becomes 16)."""
    for kind in ("qwen3-16", "llama-16"):
        check_decoding(kind, "cpu")
        check_prompts(kind, "cpu")
    check_gate("cpu")
    for vocab, dtype in CASES:
        check_drawing("cpu", vocab, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3-16", "llama-16"])
def test_fused_decoding_and_prompts_equal_transformers_on_a_gpu(kind: str) -> None:
    check_decoding(kind, "cuda")
    check_decoding(kind, "cuda", KVFormat.FP8)
    check_prompts(kind, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "dtype"), [*CASES, (151_936, torch.bfloat16)])
def test_the_draw_and_gate_kernels_equal_the_plain_rules_on_a_gpu(vocab: int, dtype: torch.dtype) -> None:
    check_drawing("cuda", vocab, dtype)
    check_gate("cuda")
