"""The trainer's device lent to rollouts: who writes what, and what becomes of a generation that is cut off."""

import asyncio

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.scheduler import Batching
from understudy.trainers.call_batching import Lane
from understudy.trainers.pacing.lending import Lender, LendingDecision, rest_of
from understudy.types.trajectory import StopReason

NEW = 90


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=42, max_position_embeddings=128, **sizes, **heads)).eval()


def make_engine(version: int) -> HFEngine:
    return HFEngine(
        make_model(), max_batch=4, device="cpu", pad_id=0, max_length=128, batching=Batching.CONTINUOUS, version=version
    )  # fmt: skip


def make_requests(count: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"r{i}", np.arange(3 + i, dtype=np.int32), Sampling(NEW), i) for i in range(count)
    ]


def logprobs_of(request: GenerateRequest, written: Generation) -> np.ndarray:
    ids = torch.tensor([[*request.tokens.tolist(), *written.tokens.tolist()]])
    with torch.no_grad():
        logprobs = make_model()(input_ids=ids).logits[0].log_softmax(-1)
    places = torch.arange(len(request.tokens) - 1, ids.shape[1] - 1)
    return logprobs[places, ids[0, places + 1]].numpy()


def both_are_being_written(engine: HFEngine) -> bool:
    batch = engine._scheduler._batch
    return batch is not None and len(batch.writing.rows) == 2 and batch.writing._step > 1


def test_a_generation_that_is_cut_off_goes_on_elsewhere() -> None:
    async def story() -> None:
        here, there = make_engine(-1), make_engine(0)
        lender = Lender(here, Lane("generate", there.generate, 4), 1, 4, LendingDecision(0.1))
        requests = make_requests(3)
        calls = [asyncio.create_task(lender.run([request])) for request in requests]
        await asyncio.sleep(0.02)
        assert lender._at_there == 1 and lender._at_here == 0, "the others wait for a place"
        await lender.open(7)
        while not both_are_being_written(here):
            await asyncio.sleep(0.001)
        await lender.close()
        assert lender._at_here == 0 and here._scheduler._resting
        results = [(await call)[0] for call in calls]
        for request, written in zip(requests, results, strict=True):
            assert len(written.tokens) == NEW
            np.testing.assert_allclose(written.logprobs, logprobs_of(request, written), atol=1e-4)
        versions = [list(dict.fromkeys(written.weight_versions.tolist())) for written in results]
        assert versions[0] == [0] and versions[1] == versions[2] == [7, 0]
        assert lender.take_counts() == {"perf/async/lent_calls": 2.0, "perf/async/lent_cut": 2.0}
        await here.close()
        await there.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_the_device_is_lent_only_after_a_while_and_is_back_when_rows_are_there() -> None:
    async def story() -> None:
        here, there = make_engine(-1), make_engine(0)
        lender = Lender(here, Lane("generate", there.generate, 4), 1, 4, LendingDecision(0.05, lends=True))
        async with lender.while_waiting(3):
            assert not lender._is_open
        assert not lender._is_open and here.version == -1, "rows came at once: nothing was lent"
        async with lender.while_waiting(3):
            calls = [asyncio.create_task(lender.run([request])) for request in make_requests(3)]
            await asyncio.gather(*calls)
        assert here.version == 3 and lender.served and not lender._is_open
        await here.close()
        await there.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_one_slow_batch_decides_nothing() -> None:
    decision = LendingDecision(after=1.0)
    assert decision.observe(5.0) is None and decision.observe(0.1) is None and decision.observe(5.0) is None
    assert not decision.lends
    assert "twice running" in (decision.observe(2.0) or "") and decision.lends
    assert decision.observe(0.1) is None and decision.observe(3.0) is None and decision.observe(0.1) is None
    assert "no longer" in (decision.observe(0.2) or "") and not decision.lends


def test_what_is_left_of_a_request() -> None:
    (request,) = make_requests(1)
    nothing = Generation(
        np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), StopReason.ABORTED
    )
    assert rest_of(request, nothing) is request
    some = Generation(
        np.array([4, 5], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), StopReason.ABORTED
    )
    rest = rest_of(request, some)
    assert rest.tokens.tolist() == [0, 1, 2, 4, 5] and rest.sampling.max_new_tokens == NEW - 2
    assert rest.seed != request.seed
