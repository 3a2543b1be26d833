"""Small scoring requests are scored between the parts of a large one, on a real GPU, with the same bits."""

import time
from pathlib import Path

import numpy as np
import pytest
from device_models import save_model

from understudy.teacher.manifest import RequestBatching
from understudy.teacher.protocol import ScoreRequest, request_of
from understudy.teacher.replica.scoring_queue import ScoringWorker
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.types.scores import ScoreItem, Signal

pytestmark = pytest.mark.gpu


def test_small_scoring_requests_finish_before_a_large_one_with_the_same_bits(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen3", layers=12, seed=3)
    frozen = load_frozen(str(tmp_path / "model"), dtype="bfloat16", device="cuda")
    scorer = Scorer("t", frozen, ScorerOptions(max_batch_tokens=2048))
    rng = np.random.default_rng(0)

    def request(rows: int) -> ScoreRequest:
        tokens = rng.integers(0, frozen.config.vocab_size, (rows, 64)).astype(np.int32)
        where = np.arange(1, 64, dtype=np.int32)
        return request_of([ScoreItem(f"{i}", row, where, Signal.TOPK, 8) for i, row in enumerate(tokens)])

    large, small = request(6400), [request(2) for _ in range(5)]  # 200 parts
    alone = [scorer.score(one) for one in (large, *small)]
    worker = ScoringWorker(scorer, RequestBatching.BY_REQUEST)
    worker.start()
    begun = time.perf_counter()
    whole = worker.submit(large)
    seconds = []
    for one, expected in zip(small, alone[1:], strict=True):
        asked = time.perf_counter()
        reply = worker.submit(one).result(60)
        seconds.append(time.perf_counter() - asked)
        assert reply.logprobs.tobytes() == expected.logprobs.tobytes()
    assert not whole.done()
    assert whole.result(60).logprobs.tobytes() == alone[0].logprobs.tobytes()
    assert max(seconds) < (time.perf_counter() - begun) / 10
    worker.stop()
