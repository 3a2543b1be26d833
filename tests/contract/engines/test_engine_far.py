"""The engine contract over requests whose tokens others bring, and what only such requests can suffer."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from engine_contract import (
    CANDIDATE_CHECKS,
    CHECKS,
    CONTROL_CHECKS,
    check_a_live_update_splits_generations_by_version,
    requests,
    until,
)
from engines_under_contract import CONTEXT, hf_composed, make_model
from hosted_rig import hosted
from test_engine_contract_hosted import assert_same_bits, mixed_batch

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.hosted.engine import HostedEngine
from understudy.engines.hosted.messages import encode_call
from understudy.engines.hosted.worker_client import Deposits
from understudy.engines.remote_tokens import BearerGone, Brought, CallGivenUp, FarRequest, Grant, NotBrought
from understudy.errors import EngineError
from understudy.rollout.workers.messages import brought_of
from understudy.types.trajectory import StopReason


class Holder:
    """Has a request's tokens, as a worker does."""

    def __init__(self, request: GenerateRequest, deposits: Deposits) -> None:
        self.request, self._deposits = request, deposits
        self.written: dict[int, Generation] = {}
        self.calls: list[int] = []
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.before: Callable[[Grant], Grant] = lambda grant: grant

    async def bring(self, grant: Grant) -> Brought:
        self.calls.append(grant.call)
        bringing = asyncio.ensure_future(self._bring(self.before(grant)))
        try:
            await asyncio.wait([bringing, self.gone], return_when=asyncio.FIRST_COMPLETED)
            if self.gone.done():
                raise BearerGone("left")
            return bringing.result()
        finally:
            bringing.cancel()

    async def _bring(self, grant: Grant) -> Brought:
        try:
            written = await self._deposits.bring(grant, self.request.tokens, self.request.sampling)
        except CallGivenUp:
            await asyncio.Event().wait()  # whoever gave it up says what comes next
            raise
        self.written[grant.call] = written
        return brought_of(written)

    def leave(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    give_up = leave

    @property
    def last(self) -> Generation:
        return self.written[self.calls[-1]]


class Stopped(Holder):
    """A worker that hangs before it brings anything."""

    async def _bring(self, grant: Grant) -> Brought:
        await asyncio.Event().wait()
        raise AssertionError


class Deaf(Holder):
    """A worker whose answer is lost on the way."""

    async def _bring(self, grant: Grant) -> Brought:
        await super()._bring(grant)
        await asyncio.Event().wait()
        raise AssertionError


class FarEngine:
    """An `Engine` that is asked by name; the arrays are put together from what holders were given."""

    def __init__(self, engine: HostedEngine) -> None:
        self._engine, self.deposits = engine, Deposits()
        self.update_weights, self.pause, self.resume = engine.update_weights, engine.pause, engine.resume
        self.abort = engine.abort

    @property
    def version(self) -> int:
        return self._engine.version

    def far(self, holder: Holder, patience: float = 600.0) -> FarRequest:
        one = holder.request
        most = one.sampling.max_new_tokens
        return FarRequest.of(one.key, len(one.tokens), most, one.seed, one.session, holder, patience)

    async def generate(self, asked: Sequence[GenerateRequest]) -> list[Generation]:
        holders = [Holder(request, self.deposits) for request in asked]
        told = await self._engine.generate([self.far(holder) for holder in holders])
        found = []
        for holder, facts in zip(holders, told, strict=True):
            whole = holder.last if holder.calls else facts
            assert len(facts.tokens) == len(whole.tokens) and facts.stop_reason is whole.stop_reason
            assert not facts.tokens.any() and not facts.logprobs.any(), "lengths alone"
            found.append(whole)
        return found


Opened = tuple[asyncio.Runner, FarEngine, HostedEngine, Any]


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with asyncio.Runner() as runner:
        context = hosted(make_model(), tmp_path_factory.mktemp("far"), hosts=2)
        engine, processes = runner.run(context.__aenter__())
        wrapped = FarEngine(engine)
        yield runner, wrapped, engine, processes
        runner.run(wrapped.deposits.close())
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize(
    "check", [*CHECKS, *CONTROL_CHECKS, *CANDIDATE_CHECKS], ids=lambda check: check.__name__
)
def test_contract(far: Opened, check: Any) -> None:
    runner, engine, *_ = far
    runner.run(asyncio.wait_for(check(engine, make_model()), 60))


def test_bytes_through_the_asker_do_not_depend_on_what_is_written(far: Opened) -> None:
    runner, engine, hosts, _ = far
    seen = []
    for new in (2, 100):
        before = (hosts.traffic.sent, hosts.traffic.received)
        runner.run(engine.generate(requests(6, Sampling(new))))
        seen.append((hosts.traffic.sent - before[0], hosts.traffic.received - before[1]))
    assert seen[0][1] == seen[1][1] and abs(seen[0][0] - seen[1][0]) <= 1, "the call's number may grow"


def test_a_holder_that_leaves_ends_the_call_and_frees_the_engine(far: Opened) -> None:
    runner, engine, hosts, _ = far

    async def body() -> None:
        for leaves in ("before anything was brought", "in the middle of the batch"):
            holders = [Holder(one, engine.deposits) for one in requests(4, Sampling(CONTEXT - 20))]
            if leaves != "in the middle of the batch":
                holders[2] = Stopped(holders[2].request, engine.deposits)
            task = asyncio.create_task(hosts.generate([engine.far(one) for one in holders]))
            await until(lambda: all(one.calls for one in holders))  # noqa: B023 - awaited here
            holders[2].leave()
            with pytest.raises(BearerGone):
                await task
            assert not holders[0].written, "nobody has a part of it"
            assert set(hosts.outstanding_tokens.values()) == {0}
            # The same rows once more, as a cohort does it.
            whole = await engine.generate([one.request for one in holders])
            assert [len(one.tokens) for one in whole] == [CONTEXT - 20] * 4

    runner.run(asyncio.wait_for(body(), 60))


def test_a_caller_that_gives_up_is_noticed_and_nothing_is_left(far: Opened) -> None:
    runner, engine, hosts, _ = far

    async def body() -> None:
        holders = [Holder(one, engine.deposits) for one in requests(8, Sampling(CONTEXT - 20))]
        long = asyncio.create_task(hosts.generate([engine.far(one) for one in holders]))
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(
            engine.generate(requests(8, Sampling(2)))
        )  # the same keys: the same host
        long.cancel()
        assert [len(one.tokens) for one in await waiting] == [2] * 8
        with pytest.raises(asyncio.CancelledError):
            await long

    runner.run(asyncio.wait_for(body(), 60))


def test_tokens_that_do_not_come_in_time_fail_their_request_alone(far: Opened) -> None:
    runner, engine, hosts, _ = far

    async def body() -> None:
        asked = requests(3, Sampling(4))
        holders = [Holder(asked[0], engine.deposits), Stopped(asked[1], engine.deposits)]
        with pytest.raises(BearerGone, match="1 of 2 requests were not brought"):
            await hosts.generate([engine.far(one, patience=0.3) for one in holders])
        assert holders[1].gone.done() and not holders[0].gone.done()
        holders = [Holder(asked[0], engine.deposits), Deaf(asked[2], engine.deposits)]
        with pytest.raises(BearerGone, match="did not get their answer"):
            await hosts.generate([engine.far(one, patience=0.3) for one in holders])
        assert holders[1].gone.done() and holders[0].written

    runner.run(asyncio.wait_for(body(), 60))


def test_a_holder_that_cannot_reach_a_living_host_is_named(
    far: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, engine, hosts, _ = far
    monkeypatch.setattr("understudy.engines.hosted.engine._NOT_BROUGHT_PAUSE_S", 0.01)

    def elsewhere(grant: Grant) -> Grant:
        return Grant(grant.call, "http://127.0.0.1:9", None, grant.key, grant.session, grant.seed)

    async def body() -> None:
        holders = [Holder(one, engine.deposits) for one in requests(2, Sampling(4))]
        holders[1].before = elsewhere
        with pytest.raises(EngineError, match=r"5 times.*replica-\d lives.*127\.0\.0\.1:9"):
            await hosts.generate([engine.far(one) for one in holders])
        assert len(set(holders[0].calls)) == 5, "each attempt is a call of its own"
        holders[1].before = lambda grant: grant
        assert len((await hosts.generate([engine.far(one) for one in holders]))[1].tokens) == 4
        with pytest.raises(EngineError, match="all or none"):
            await hosts.generate([engine.far(holders[0]), holders[1].request])

    runner.run(asyncio.wait_for(body(), 60))


def test_whatever_a_host_is_sent_it_stays_up(far: Opened) -> None:
    runner, engine, hosts, _ = far

    async def body() -> None:
        http = hosts._channels["replica-0"]._http
        one, two = requests(2, Sampling(3))
        for order in (
            b"",
            b"[]",
            b'{"call": 1}',
            b'{"call": 1, "keys": []}',
            b'{"call": 1, "keys": ["a", "a"]}',
        ):
            assert (await http.post("/v1/compose", content=order)).status_code == 400, order
        for frame in (b"", b"x" * 40, encode_call(10**6, []), encode_call(10**6, [one, two])):
            assert (await http.post("/v1/deposit", content=frame)).status_code == 400, frame
        # Two bring the same row, to a call that nobody composes and gives up: the second is refused, the first let go with it.
        first = asyncio.create_task(http.post("/v1/deposit", content=encode_call(10**6, [one])))
        await asyncio.sleep(0.2)
        assert (await http.post("/v1/deposit", content=encode_call(10**6, [one]))).status_code == 400
        late = {"call": 10**6, "keys": [one.key, "never"], "patience_s": 0.1}
        assert (await http.post("/v1/compose", json=late)).json() == {"missing": ["never"]}
        assert (await first).status_code == 410
        async with httpx.AsyncClient(base_url=str(http.base_url)) as stranger:
            for path in ("/v1/compose", "/v1/deposit"):
                assert (await stranger.post(path, json=late)).status_code == 401
        assert len((await engine.generate([one]))[0].tokens) == 3

    runner.run(asyncio.wait_for(body(), 60))


def test_bits_equal_the_in_process_engine_s_also_after_a_kill_in_the_middle(
    far: Opened, tmp_path: Path
) -> None:
    runner, engine, hosts, processes = far

    async def body() -> None:
        async with hf_composed(make_model(), tmp_path) as inside:
            torch.set_num_threads(1)
            batches = [mixed_batch(seed) for seed in range(6)]
            answers = await asyncio.gather(*(engine.generate(batch) for batch in batches))
            for batch, answer in zip(batches, answers, strict=True):
                assert_same_bits(answer, await inside.generate(batch))
            long = requests(6, Sampling(CONTEXT - 20))
            holders = [Holder(one, engine.deposits) for one in long]
            task = asyncio.create_task(hosts.generate([engine.far(one) for one in holders]))
            await until(lambda: all(one.calls for one in holders))
            (busy,) = [name for name, tokens in hosts.outstanding_tokens.items() if tokens]
            os.kill(processes.children[busy.replace("replica", "rollout")].ready["pid"], signal.SIGKILL)
            told = await task
            assert [len(one.calls) for one in holders] == [2] * 6, "the whole batch again, at the other"
            assert_same_bits([one.last for one in holders], await inside.generate(long))
            assert [one.stop_reason for one in told] == [StopReason.LENGTH] * 6

    runner.run(asyncio.wait_for(body(), 120))


def test_live_update(far: Opened) -> None:
    runner, engine, *_ = far
    runner.run(check_a_live_update_splits_generations_by_version(engine, make_model(), make_model(seed=1)))


def test_a_way_that_breaks_is_told_apart_from_a_batch_that_was_given_up() -> None:
    async def body() -> None:
        deposits = Deposits()
        with pytest.raises(NotBrought, match=r"127\.0\.0\.1:9"):
            await deposits.bring(
                Grant(1, "http://127.0.0.1:9", None, "a", "a", 1), np.arange(3, dtype=np.int32), Sampling(2)
            )
        await deposits.close()

    asyncio.run(asyncio.wait_for(body(), 30))
