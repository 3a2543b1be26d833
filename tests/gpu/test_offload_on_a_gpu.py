"""Teachers with layers in host memory, on a real GPU: the same bits as without, and less GPU memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from device_models import save_model

from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.offload import offloaded
from understudy.teacher.scoring.scorer import Scorer
from understudy.types.scores import ScoreItem, Signal

pytestmark = pytest.mark.gpu
LAYERS = 12


@pytest.mark.parametrize("wanted", ["1", "5", "all"])
def test_a_teacher_with_offloaded_layers_gives_the_same_bits_with_less_gpu_memory(
    tmp_path: Path, wanted: str
) -> None:
    """Many forward passes are queued without waiting: a copy made too early or too late would change scores."""
    model = tmp_path / "model"
    save_model(model, "qwen3", layers=LAYERS, seed=3)
    rng = np.random.default_rng(0)

    def scored(offload: bool) -> tuple[list[bytes], int]:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        frozen = load_frozen(str(model), dtype="bfloat16", device="cpu" if offload else "cuda")
        if offload:
            frozen = offloaded(frozen, wanted, "cuda")
        held = torch.cuda.memory_allocated() - before
        scorer = Scorer("t", frozen)
        begun = [scorer.begin(request_of(rows)) for rows in batches]
        return [scorer.finish(one).sampled_P.tobytes() for one in begun], held

    vocabulary = load_frozen(str(model)).config.vocab_size
    batches = [
        [
            ScoreItem(
                f"{batch}-{row}",
                rng.integers(0, vocabulary, 20 + 7 * row).astype(np.int32),
                np.arange(1, 20 + 7 * row, dtype=np.int32),
                Signal.SAMPLED,
            )
            for row in range(6)
        ]
        for batch in range(8)
    ]
    whole, full_bytes = scored(False)
    moved, offloaded_bytes = scored(True)
    assert moved == whole
    assert offloaded_bytes < full_bytes or wanted == "1"
