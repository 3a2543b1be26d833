"""The contract of engines. Each `check_...` takes an open engine and asserts; the tests choose the engines."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from engines_under_contract import CONTEXT, EOS, VOCAB

from understudy.engines.base import Engine, GenerateRequest, Generation, Sampling
from understudy.engines.servers.engine import RemoteEngine
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason


def requests(count: int, sampling: Sampling, seed: int = 0) -> list[GenerateRequest]:
    rng = np.random.default_rng(seed)
    return [
        GenerateRequest(
            f"row-{i}", rng.integers(3, VOCAB, rng.integers(2, 12)).astype(np.int32), sampling, seed=500 + i
        )
        for i in range(count)
    ]


def forced(
    model: Any, request: GenerateRequest, generation: Generation, temperature: float = 1.0
) -> np.ndarray:
    """The logprobs that a trainer computes for the generated tokens of the finished row."""
    ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens.tolist()]])
    with torch.no_grad():
        logprobs = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
    start = len(request.tokens)
    return np.asarray(logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0])


async def check_generations_are_in_order_with_the_trainers_logprobs(engine: Engine, model: Any) -> None:
    for temperature in (1.0, 0.7):
        asked = requests(12, Sampling(10, (EOS,), temperature=temperature))
        for request, generation in zip(asked, await engine.generate(asked), strict=True):
            assert generation.tokens.dtype == np.int32 and generation.logprobs.dtype == np.float32
            np.testing.assert_allclose(
                generation.logprobs, forced(model, request, generation, temperature), atol=1e-4
            )
            assert set(generation.weight_versions.tolist()) == {0}


async def check_logprobs_under_top_k_are_of_the_filtered_distribution(engine: Engine, model: Any) -> None:
    asked = requests(8, Sampling(6, top_k=3))
    for request, generation in zip(asked, await engine.generate(asked), strict=True):
        ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(request.tokens) - 1 : -1].float()
        best = logits.topk(3)
        kept = best.values.log_softmax(-1)
        for place, token in enumerate(generation.tokens.tolist()):
            (rank,) = (best.indices[place] == token).nonzero()[0].tolist()
            assert abs(float(kept[place, rank]) - float(generation.logprobs[place])) < 1e-4


async def check_the_same_seed_repeats_the_same_tokens(engine: Engine, model: Any) -> None:
    asked = requests(6, Sampling(12))
    first, second = await engine.generate(asked), await engine.generate(asked)
    assert [g.tokens.tolist() for g in first] == [g.tokens.tolist() for g in second]
    again = [GenerateRequest(r.key, r.tokens, r.sampling, r.seed + 77) for r in asked]
    assert [g.tokens.tolist() for g in first] != [g.tokens.tolist() for g in await engine.generate(again)]


async def check_candidates_are_the_models_most_likely_tokens(engine: Engine, model: Any) -> None:
    """At a high temperature unlikely tokens are sampled, so the candidates must differ from the sampled tokens."""
    asked = requests(6, Sampling(10, temperature=2.0, candidates=5))
    for request, generation in zip(asked, await engine.generate(asked), strict=True):
        ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(request.tokens) - 1 : -1].float()
        assert generation.candidate_ids is not None and generation.candidate_ids.dtype == np.int32
        assert generation.candidate_ids.tolist() == logits.topk(5).indices.tolist()
    (without,) = await engine.generate(requests(1, Sampling(3)))
    assert without.candidate_ids is None


async def check_temperature_zero_is_greedy(engine: Engine, model: Any) -> None:
    asked = requests(4, Sampling(8, temperature=0.0))
    for request, generation in zip(asked, await engine.generate(asked), strict=True):
        ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens.tolist()]])
        with torch.no_grad():
            best = model(input_ids=ids).logits[0].argmax(-1)
        assert generation.tokens.tolist() == best[len(request.tokens) - 1 : -1].tolist()


async def check_the_stop_token_is_kept_and_the_stop_reason_is_right(engine: Engine, model: Any) -> None:
    stops = tuple(range(3, 20))
    for generation in await engine.generate(requests(24, Sampling(12, stops, temperature=2.0))):
        inside = [token in stops for token in generation.tokens.tolist()]
        if generation.stop_reason is StopReason.EOS:
            assert inside[-1] and not any(inside[:-1])
        else:
            assert generation.stop_reason is StopReason.LENGTH and len(inside) == 12 and not any(inside)


async def check_the_models_eos_token_stops_only_when_it_is_a_stop_token(engine: Engine, model: Any) -> None:
    generations = await engine.generate(requests(24, Sampling(40, temperature=2.0)))
    assert all(g.stop_reason is StopReason.LENGTH and len(g.tokens) == 40 for g in generations)
    assert any(EOS in g.tokens for g in generations)


async def check_a_request_that_is_too_long_is_refused_with_its_key(engine: Engine, model: Any) -> None:
    with pytest.raises(EngineError, match=f"row-long.*{CONTEXT}"):
        await engine.generate([GenerateRequest("row-long", np.full(CONTEXT, 5, np.int32), Sampling(10), 0)])


async def check_an_empty_batch_gives_no_generations(engine: Engine, model: Any) -> None:
    assert await engine.generate([]) == []


async def check_pause_stops_generation_and_resume_continues_it(engine: Engine, model: Any) -> None:
    asked = requests(3, Sampling(60))
    task = asyncio.create_task(engine.generate(asked))
    await asyncio.sleep(0.15)
    await engine.pause()
    late = asyncio.create_task(engine.generate(asked[:1]))
    await asyncio.sleep(0.3)
    assert not late.done(), "nothing may be generated while paused"
    await engine.resume()
    for request, generation in zip(asked, await task, strict=True):
        assert len(generation.tokens) == 60
        np.testing.assert_allclose(generation.logprobs, forced(model, request, generation), atol=1e-4)
    assert len((await late)[0].tokens) == 60


async def check_abort_returns_the_tokens_generated_so_far(engine: Engine, model: Any) -> None:
    """Aborts after pauses of growing length until one comes in the middle of a batch. A plain OpenAI server answers
    only with whole generations, so the tokens of an aborted one are not known."""
    asked, aborted = requests(3, Sampling(100)), False
    fewest = 0 if isinstance(engine, RemoteEngine) and engine._dialect.name == "openai" else 1
    for pause in cycle([*islice(widening_pauses(), 12)]):
        if aborted:
            break
        task = asyncio.create_task(engine.generate(asked))
        await asyncio.wait([task], timeout=pause)
        await engine.abort()
        for request, generation in zip(asked, await task, strict=True):
            assert len(generation.tokens) == 100 or generation.stop_reason is StopReason.ABORTED
            if len(generation.tokens):
                np.testing.assert_allclose(generation.logprobs, forced(model, request, generation), atol=1e-4)
            aborted |= fewest <= len(generation.tokens) < 100
    (after,) = await engine.generate(asked[:1])
    assert len(after.tokens) == 100, "the engine must still generate after an abort"


async def until(condition: Callable[[], object]) -> None:
    """Waits until the condition holds. The test's own timeout bounds the wait."""
    while not condition():
        await asyncio.sleep(0.005)


def widening_pauses() -> Iterator[float]:
    """Seconds, each 1.5 times the one before, so that one pause ends within a piece of work of any length."""
    return (0.02 * 1.5**i for i in count())


async def check_a_live_update_splits_generations_by_version(engine: Engine, model: Any, new: Any) -> None:
    """`model` must be a copy that the engine does not own: its weights are the old ones.

    Updates are published after pauses of growing length while a batch is generated, so that one comes in the middle on
    any machine. Odd versions have the weights of `new`, even ones those of `model`.
    """
    asked = requests(4, Sampling(120, candidates=3))
    weights = [[(name, t.detach()) for name, t in one.named_parameters()] for one in (model, new)]
    pauses, split, version = widening_pauses(), False, engine.version
    while not split:
        task = asyncio.create_task(engine.generate(asked))
        for pause in pauses:
            await asyncio.wait([task], timeout=pause)
            if task.done():
                break
            version += 1
            await engine.update_weights(version, weights[version % 2])
            assert engine.version == version
        for request, generation in zip(asked, await task, strict=True):
            versions = generation.weight_versions
            assert len(versions) == 120 and (np.diff(versions) >= 0).all() and versions[-1] <= version
            split = split or versions[0] < versions[-1]
            of_each = [forced(one, request, generation) for one in (model, new)]
            np.testing.assert_allclose(
                generation.logprobs, np.where(versions % 2, of_each[1], of_each[0]), atol=2e-4
            )
            assert generation.candidate_ids is not None and generation.candidate_ids.shape == (120, 3)
        pauses = widening_pauses()
    await engine.update_weights(1, weights[1])
    assert engine.version == 1
    (fresh,) = await engine.generate(asked[:1])
    assert set(fresh.weight_versions.tolist()) == {1}
    np.testing.assert_allclose(fresh.logprobs, forced(new, asked[0], fresh), atol=2e-4)


CHECKS = [
    check_generations_are_in_order_with_the_trainers_logprobs,
    check_logprobs_under_top_k_are_of_the_filtered_distribution,
    check_the_same_seed_repeats_the_same_tokens,
    check_temperature_zero_is_greedy,
    check_the_stop_token_is_kept_and_the_stop_reason_is_right,
    check_the_models_eos_token_stops_only_when_it_is_a_stop_token,
    check_a_request_that_is_too_long_is_refused_with_its_key,
    check_an_empty_batch_gives_no_generations,
]
CANDIDATE_CHECKS = [check_candidates_are_the_models_most_likely_tokens]
CONTROL_CHECKS = [
    check_pause_stops_generation_and_resume_continues_it,
    check_abort_returns_the_tokens_generated_so_far,
]
