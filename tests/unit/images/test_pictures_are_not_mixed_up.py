"""Equal ids with different pictures are kept apart: in a session, in a scoring request, and in the reader's cache.

`tests/faults/images/` removes the pictures from each cache key and shows that these tests then fail.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from test_teacher_pictures import items_of
from vision_models import folder_of, picture, reader_of

from understudy.engines.base import Generation, Sampling
from understudy.media.store import MediaStore
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.workers.sessions import WorkerSession
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer
from understudy.types.prompt import Prompt


def test_a_repeated_session_reuses_a_generation_only_for_the_same_pictures() -> None:
    requested: list[tuple[str, ...]] = []

    async def generate(tokens: np.ndarray, sampling: Sampling, turn: int, media: Any = ()) -> Generation:
        requested.append(tuple(media))
        return Generation.aborted()

    async def run() -> None:
        context = LoopContext(generate, None, Sampling(4), "k", 0, 64)  # type: ignore[arg-type]
        session = WorkerSession(Prompt("k", 0, 0, ""), context)
        tokens, sampling = np.arange(5, dtype=np.int32), Sampling(4)
        red, blue = ("a" * 64,), ("b" * 64,)
        first = session.generation(tokens, sampling, 0, red)
        assert session.generation(tokens.copy(), sampling, 0, red) is first
        assert session.generation(tokens, sampling, 0, blue) is not first
        await asyncio.gather(first, session.generation(tokens, sampling, 0, blue))
        session.close()

    asyncio.run(run())
    assert requested == [("a" * 64,), ("b" * 64,)]


def test_each_row_of_a_scoring_request_is_scored_with_its_own_picture(tmp_path: Path) -> None:
    folder, store = folder_of("qwen2_5_vl", seed=3), MediaStore(tmp_path)
    scorer = Scorer("t", replace(load_frozen(str(folder)), pictures=reader_of(folder, store)))
    item = items_of(folder, store)[0]
    other = replace(item, key="other", media=(store.put(picture("yellow", (40, 24), (20, 8))),))
    together = scorer.score(request_of([item, other])).split()
    for one, own in zip((item, other), together, strict=True):
        fresh = Scorer("t", replace(load_frozen(str(folder)), pictures=reader_of(folder, store)))
        (alone,) = fresh.score(request_of([one])).split()
        np.testing.assert_allclose(own.sampled_logprobs, alone.sampled_logprobs, atol=1e-5)
    assert np.abs(together[0].sampled_logprobs - together[1].sampled_logprobs).max() > 1e-3


def test_a_picture_reader_caches_arrays_by_picture(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    reader = reader_of(folder_of("smolvlm"), store)
    red, blue = (store.put(picture(colour)) for colour in ("red", "blue"))
    for _ in range(2):
        assert not np.array_equal(
            reader.arrays([red])[red]["pixel_values"], reader.arrays([blue])[blue]["pixel_values"]
        )
