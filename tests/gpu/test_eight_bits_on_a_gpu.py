"""Teachers with eight-bit weights on a real GPU: logits of the rounded head, scores, memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from device_models import save_model

from understudy.teacher.protocol import request_of
from understudy.teacher.scoring import eight_bits
from understudy.teacher.scoring.eight_bits import Bits, Int8Head, int8_logits
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.quantize import quantized
from understudy.teacher.scoring.scorer import Scorer
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.scores import ScoreItem, Signal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_logits_computed_in_parts_equal_those_of_the_rounded_weights(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    head = Int8Head.of(torch.nn.Linear(64, 1000, bias=False)).cuda()
    states = torch.randn(33, 64, device="cuda").to(dtype)
    monkeypatch.setattr(eight_bits, "_WIDENED_BYTES", 1 << 14)
    widened = (head.weight.float() * head.scale[:, None]).to(dtype)
    right = states.double() @ widened.double().T
    found = int8_logits(states, head.weight, head.scale)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("bits", list(Bits))
def test_an_eight_bit_teacher_scores_nearly_the_same_in_about_half_the_memory(
    tmp_path: Path, bits: Bits
) -> None:
    model = tmp_path / "model"
    save_model(model, "qwen3", layers=4, seed=3)
    rng = np.random.default_rng(0)

    def load_scorer(small: bool) -> tuple[Scorer, int]:
        frozen = load_frozen(str(model), dtype="bfloat16", device="cpu" if small else "cuda")
        if small:
            frozen, _ = quantized(frozen, bits, "cuda", 1.0)
        tensors = [*frozen.model.parameters(), *frozen.model.buffers()]
        assert all(tensor.is_cuda for tensor in tensors)
        # By address: the embedding and the head are one tensor.
        return Scorer("t", frozen), sum({one.data_ptr(): one.nbytes for one in tensors}.values())

    full, full_bytes = load_scorer(False)
    small, small_bytes = load_scorer(True)
    assert small_bytes < 0.54 * full_bytes  # above a half because of norms and the scales of short rows
    warm_up(small)
    rows = rng.integers(0, full.vocab, (4, 40)).astype(np.int32)
    items = [
        ScoreItem(f"{i}", row, np.arange(1, 40, dtype=np.int32), Signal.TOPK, k=8)
        for i, row in enumerate(rows)
    ]
    one, other = full.score(request_of(items)), small.score(request_of(items))
    assert np.abs(one.sampled_P - other.sampled_P).mean() < 0.3
    assert torch.equal(
        torch.from_numpy(other.sampled_P), torch.from_numpy(small.score(request_of(items)).sampled_P)
    )
