"""Pausing, aborting, live weight updates and concurrent callers of the in-process engine."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import EOS, engine_over, logprobs_over_kept_cache, make_model, make_requests, tokens_drawn
from reference_sampling import generate_plainly

from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.rows import DecodingRow, RowBatch
from understudy.engines.local.scheduler import Batching
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason

LONG = Sampling(max_new_tokens=48)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), timeout=60))


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def counting_forward_calls(model: Any, tokens_seen: list[int]) -> Any:
    """Counts forward calls, so that a test can act in the middle of a generation."""
    forward = model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        tokens_seen.append(kwargs["input_ids"].shape[1])
        torch.ones(1).add_(0)
        return forward(*args, **kwargs)

    model.forward = counting
    return model


def test_generation_does_not_block_the_event_loop() -> None:
    async def body() -> None:
        async with engine_over(make_model("qwen3")) as engine:
            task = asyncio.create_task(engine.generate(make_requests(32, LONG)))
            ticks = 0
            while not task.done():
                await asyncio.sleep(0.001)
                ticks += 1
            assert ticks > 10

    run(body)


def test_abort_returns_the_tokens_drawn_so_far() -> None:
    model = make_model("qwen3")
    steps: list[int] = []
    request = make_requests(1, LONG)[0]
    plain, _ = generate_plainly(model, request)

    async def body() -> None:
        async with engine_over(counting_forward_calls(model, steps)) as engine:
            task = asyncio.create_task(engine.generate([request]))
            await wait_until(lambda: len(steps) >= 5)
            await engine.abort()
            (generation,) = await task
            assert generation.stop_reason is StopReason.ABORTED
            assert 4 <= len(generation.tokens) < 48
            assert generation.tokens.tolist() == plain[: len(generation.tokens)]
            (after,) = await engine.generate([request])
            assert after.tokens.tolist() == plain, "the engine generates again after an abort"

    run(body)


def test_pause_stops_all_steps_and_resume_gives_the_same_tokens() -> None:
    model = make_model("qwen3")
    steps: list[int] = []
    requests = make_requests(2, LONG)
    plain = [generate_plainly(model, request)[0] for request in requests]

    async def body() -> None:
        async with engine_over(counting_forward_calls(model, steps)) as engine:
            task = asyncio.create_task(engine.generate(requests))
            await wait_until(lambda: len(steps) >= 5)
            await engine.pause()
            held = len(steps)
            await asyncio.sleep(0.05)
            assert len(steps) == held and not task.done()
            await engine.resume()
            assert [g.tokens.tolist() for g in await task] == plain

    run(body)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("entering", [0, 3])
def test_without_recompute_kv_new_weights_continue_over_the_old_keys_and_values(
    family: str, entering: int
) -> None:
    """Every token has the version of the weights that drew it, and the log-probability it was drawn with; also tokens
    of rows that enter the batch after the publish, and of rows that ended before it."""
    old, new = make_model(family, seed=0), make_model(family, seed=1)
    requests = [*make_requests(4, LONG), *make_requests(2, Sampling(5), seed=3)]
    later = make_requests(entering, Sampling(20), seed=7)

    async def body() -> None:
        settings: dict[str, Any] = {"recompute_kv": False, "batching": Batching.CONTINUOUS, "version": 3}
        async with engine_over(make_model(family, seed=0), **settings) as engine:
            task = asyncio.create_task(engine.generate(requests))
            await tokens_drawn(engine, 8)
            await engine.pause()
            joining = asyncio.create_task(engine.generate(later))
            await asyncio.sleep(0)
            await engine.update_weights(4, new.named_parameters())
            await engine.resume()
            first, second = await task, await joining
        for request, generation in zip(later, second, strict=True):
            assert set(generation.weight_versions.tolist()) == {4}
            assert generation.tokens.tolist() == generate_plainly(new, request)[0]
        mixed = 0
        for request, generation in zip(requests, first, strict=True):
            switch = int((generation.weight_versions == 3).sum())
            count = len(generation.tokens)
            assert generation.weight_versions.tolist() == [3] * switch + [4] * (count - switch)
            mixed += 0 < switch < count
            expected = logprobs_over_kept_cache(old, new, request, generation, switch)
            np.testing.assert_allclose(generation.logprobs, expected, atol=2e-5)
        assert mixed == 4

    run(body)


def test_a_live_update_continues_generations_under_the_new_weights() -> None:
    """Tokens before the update have the old version; tokens after it equal a fresh forward of the new model on
    everything so far."""
    old, new = make_model("qwen3", seed=0), make_model("qwen3", seed=1)
    steps: list[int] = []
    requests = make_requests(6, LONG)

    async def body() -> None:
        async with engine_over(
            counting_forward_calls(make_model("qwen3", seed=0), steps), version=3
        ) as engine:
            task = asyncio.create_task(engine.generate(requests))
            await wait_until(lambda: len(steps) >= 8)
            await engine.update_weights(4, new.named_parameters())
            assert engine.version == 4
            for request, generation in zip(requests, await task, strict=True):
                switch = int((generation.weight_versions == 3).sum())
                assert generation.weight_versions.tolist() == [3] * switch + [4] * (48 - switch)
                assert 0 < switch < 48
                for start, end, model in ((0, switch, old), (switch, 48, new)):
                    ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens[:end].tolist()]])
                    with torch.no_grad():
                        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
                    at = len(request.tokens) + start
                    expected = logprobs[at - 1 : -1].gather(1, ids[0, at:, None])[:, 0].numpy()
                    np.testing.assert_allclose(generation.logprobs[start:end], expected, atol=2e-5)

    run(body)


class Counted:
    """Records the padded tokens of each batch that the engine builds after the first update, and can fail at one of
    them."""

    def __init__(self, engine: HFEngine, fails_at: int = -1) -> None:
        self._engine, self._build, self._fails_at = engine, engine._scheduler._build, fails_at
        self.padded: list[int] = []
        engine._scheduler._build = self

    def __call__(self, rows: Sequence[DecodingRow]) -> RowBatch:
        if self._engine.version > 0:
            if len(self.padded) == self._fails_at:
                raise RuntimeError("no memory")
            self.padded.append(len(rows) * max(map(len, rows)))
        return self._build(rows)


BUDGET = 90
"""All rows of the next tests enter at once; they no longer fit when each has written eight tokens."""


@pytest.mark.parametrize("batching", list(Batching))
def test_rows_are_read_again_within_the_prefill_budget_after_an_update(batching: Batching) -> None:
    async def written(budget: int) -> tuple[list[list[int]], list[int]]:
        steps: list[int] = []
        settings: dict[str, Any] = {"batching": batching, "prefill_tokens": budget, "version": 0}
        async with engine_over(counting_forward_calls(make_model("qwen3"), steps), **settings) as engine:
            counted = Counted(engine)
            task = asyncio.create_task(engine.generate(make_requests(8, LONG)))
            await wait_until(lambda: len(steps) >= 9)
            await engine.update_weights(1, make_model("qwen3").named_parameters())
            return [one.tokens.tolist() for one in await task], counted.padded

    async def body() -> None:
        tokens, padded = await written(BUDGET)
        assert len(padded) > 1 and max(padded) <= BUDGET
        assert tokens == [generate_plainly(make_model("qwen3"), one)[0] for one in make_requests(8, LONG)]
        _, padded = await written(65_536)
        assert len(padded) == 1

    run(body)


def test_every_caller_gets_the_error_when_some_rows_cannot_be_read_again_after_an_update() -> None:
    """Callers of rows that were read before the failure, of those that failed, and of those still to be read."""

    async def body() -> None:
        steps: list[int] = []
        settings: dict[str, Any] = {"batching": Batching.CONTINUOUS, "prefill_tokens": BUDGET, "version": 0}
        async with engine_over(counting_forward_calls(make_model("qwen3"), steps), **settings) as engine:
            Counted(engine, fails_at=1)
            calls = [asyncio.create_task(engine.generate([one])) for one in make_requests(8, LONG)]
            await wait_until(lambda: len(steps) >= 9)
            await engine.update_weights(1, make_model("qwen3").named_parameters())
            for call in calls:
                with pytest.raises(EngineError, match="no memory"):
                    await call

    run(body)


def test_an_update_during_a_pause_leaves_the_engine_paused() -> None:
    async def body() -> None:
        async with engine_over(make_model("qwen3")) as engine:
            await engine.pause()
            await engine.update_weights(1, make_model("qwen3", seed=1).named_parameters())
            task = asyncio.create_task(engine.generate(make_requests(1, Sampling(3))))
            await asyncio.sleep(0.1)
            assert not task.done()
            await engine.resume()
            assert (await task)[0].weight_versions.tolist() == [1] * 3

    run(body)


def test_abort_ends_running_and_waiting_calls_but_no_later_ones() -> None:
    async def body() -> None:
        async with engine_over(make_model("qwen3")) as engine:
            await engine.abort()
            await engine.pause()
            early = asyncio.create_task(engine.generate(make_requests(1, LONG)))
            await asyncio.sleep(0.05)
            await engine.abort()
            late = asyncio.create_task(engine.generate(make_requests(1, Sampling(3))))
            (aborted,) = await early
            assert aborted.stop_reason is StopReason.ABORTED and len(aborted.tokens) == 0, (
                "waiting rows end too"
            )
            await engine.resume()
            assert len((await late)[0].tokens) == 3

    run(body)


def test_an_update_that_fails_half_way_fails_running_generations() -> None:
    steps: list[int] = []
    weights = dict(make_model("qwen3", seed=1).named_parameters())

    async def body() -> None:
        async with engine_over(counting_forward_calls(make_model("qwen3"), steps), max_length=5000) as engine:
            task = asyncio.create_task(engine.generate(make_requests(1, Sampling(4000))))
            await wait_until(lambda: len(steps) >= 3)
            with pytest.raises(EngineError, match=r"no\.such"):
                await engine.update_weights(7, {**weights, "no.such": torch.ones(1)}.items())
            with pytest.raises(EngineError, match="half-way"):
                await task

    run(body)


def test_a_request_made_while_weights_are_copied_waits_for_the_new_weights() -> None:
    request, half, go_on = make_requests(1, Sampling(20))[0], threading.Event(), threading.Event()
    trained = make_model("qwen3", seed=1)

    def one_after_another() -> Iterator[tuple[str, torch.Tensor]]:
        for number, named in enumerate(trained.named_parameters()):
            if number == 1:
                half.set()
                assert go_on.wait(30)
            yield named

    async def body() -> None:
        async with engine_over(make_model("qwen3")) as engine:
            update = asyncio.create_task(engine.update_weights(7, one_after_another()))
            await asyncio.to_thread(half.wait, 30)
            writing = asyncio.create_task(engine.generate([request]))
            await asyncio.sleep(0.05)
            go_on.set()
            await update
            (generation,) = await writing
            assert generation.tokens.tolist() == generate_plainly(trained, request)[0]
            assert set(generation.weight_versions.tolist()) == {7}

    run(body)


def test_an_engine_with_shared_parameters_uses_new_weights_without_a_copy() -> None:
    trained = make_model("qwen3").train()
    request = make_requests(1, Sampling(20))[0]

    async def body() -> None:
        async with engine_over(make_model("qwen3", seed=9)) as engine:
            engine.share_parameters_with(trained)
            await engine.update_weights(0, ())
            (before,) = await engine.generate([request])
            assert trained.training, "generating must not put the trained model into eval mode"
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.3)
            await engine.update_weights(1, ())
            (after,) = await engine.generate([request])
            assert before.tokens.tolist() != after.tokens.tolist()
            assert after.tokens.tolist() == generate_plainly(trained.eval(), request)[0]
            assert set(after.weight_versions.tolist()) == {1}

    run(body)


def test_after_an_incomplete_update_the_engine_refuses_requests_until_a_complete_one() -> None:
    model = make_model("qwen3", seed=1)
    weights = dict(model.named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"

    async def body() -> None:
        async with engine_over(make_model("qwen3")) as engine:
            for wrong, says in (
                ({k: v for k, v in weights.items() if k != name}, name),
                ({**weights, "no.such": torch.ones(1)}, "no.such"),
                ({**weights, name: torch.ones(2)}, "shape"),
            ):
                with pytest.raises(EngineError, match=says):
                    await engine.update_weights(7, wrong.items())
                assert engine.version == -1
                with pytest.raises(EngineError, match="half-way"):
                    await engine.generate(make_requests(1, LONG))
            await engine.update_weights(8, weights.items())
            (generation,) = await engine.generate(make_requests(1, Sampling(20)))
            assert generation.tokens.tolist() == generate_plainly(model, make_requests(1, Sampling(20))[0])[0]

    run(body)


@pytest.mark.parametrize("batching", list(Batching))
def test_concurrent_callers_get_the_tokens_of_a_plain_forward_loop(batching: Batching) -> None:
    model = make_model("qwen3")
    requests = make_requests(16, Sampling(8, (EOS,)))
    plain = [generate_plainly(model, request)[0] for request in requests]

    async def body() -> None:
        async with engine_over(model, batching=batching, max_batch=4) as engine:
            calls = [engine.generate([request]) for request in requests]
            generations = [generation for (generation,) in await asyncio.gather(*calls)]
            assert [g.tokens.tolist() for g in generations] == plain

    run(body)


def test_a_late_short_request_is_answered_first_only_with_continuous_batching() -> None:
    """With composed batches, a one-token request made while a long one runs has to wait."""

    async def order(batching: Batching) -> list[str]:
        steps: list[int] = []
        ended: list[str] = []
        long, short = make_requests(1, LONG)[0], make_requests(1, Sampling(1))[0]
        async with engine_over(
            counting_forward_calls(make_model("qwen3"), steps), batching=batching
        ) as engine:

            async def ask(name: str, request: GenerateRequest) -> None:
                await engine.generate([request])
                ended.append(name)

            first = asyncio.create_task(ask("long", long))
            await wait_until(lambda: len(steps) >= 3)
            await asyncio.gather(first, ask("short", short))
        return ended

    async def body() -> None:
        assert await order(Batching.CONTINUOUS) == ["short", "long"]
        assert await order(Batching.COMPOSED) == ["long", "short"]

    run(body)


def test_late_rows_enter_a_running_batch_if_all_of_them_fit() -> None:
    """One late row takes the last free place, though that is less than a fair share of places. Of two late rows only
    one would fit, so both wait until more can enter at once."""

    async def order(late: int) -> list[str]:
        steps: list[int] = []
        ended: list[str] = []
        async with engine_over(
            counting_forward_calls(make_model("qwen3"), steps), batching=Batching.CONTINUOUS, max_batch=32
        ) as engine:

            async def ask(name: str, requests: list[GenerateRequest]) -> None:
                await engine.generate(requests)
                ended.append(name)

            first = asyncio.create_task(ask("long", make_requests(31, LONG)))
            await wait_until(lambda: len(steps) >= 3)
            await asyncio.gather(first, ask("short", make_requests(late, Sampling(1))))
        return ended

    async def body() -> None:
        assert await order(late=1) == ["short", "long"]
        assert await order(late=2) == ["long", "short"]

    run(body)


def test_cancelling_a_call_frees_the_engine_for_the_next_request() -> None:
    async def body() -> None:
        steps: list[int] = []
        async with engine_over(counting_forward_calls(make_model("qwen3"), steps), max_length=5000) as engine:
            task = asyncio.create_task(engine.generate(make_requests(2, Sampling(4000))))
            await wait_until(lambda: len(steps) >= 3)
            task.cancel()
            (generation,) = await engine.generate(make_requests(1, Sampling(3)))
            assert len(generation.tokens) == 3
            assert len(steps) < 3000

    run(body)


def test_an_error_in_the_model_fails_its_callers_but_no_later_ones() -> None:
    model = make_model("qwen3")
    forward = model.forward
    broken = True

    def failing(*args: Any, **kwargs: Any) -> Any:
        if broken:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    model.forward = failing

    async def body() -> None:
        nonlocal broken
        async with engine_over(model) as engine:
            with pytest.raises(EngineError, match=r"row-0.*out of memory"):
                await engine.generate(make_requests(1, LONG))
            broken = False
            assert len(await engine.generate(make_requests(1, Sampling(2)))) == 1

    run(body)


def test_close_fails_running_generations_and_later_requests_are_refused() -> None:
    async def body() -> None:
        steps: list[int] = []
        engine = HFEngine(
            counting_forward_calls(make_model("qwen3"), steps),
            max_batch=4,
            device="cpu",
            pad_id=0,
            max_length=5000,
        )
        task = asyncio.create_task(engine.generate(make_requests(1, Sampling(4000))))
        await wait_until(lambda: len(steps) >= 3)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(make_requests(1, LONG))

    run(body)
