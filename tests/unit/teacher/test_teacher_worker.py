"""The scoring thread: merged requests get separate replies, bad ones fail alone, cancelled ones are skipped."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from teacher_rig import random_items

from understudy.teacher.manifest import RequestBatching
from understudy.teacher.protocol import ScoreReply, ScoreRequest, request_of
from understudy.teacher.replica.scoring_queue import ScoringWorker, divided, merged
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.device_work import Event
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import QueuedRequest, Scorer, ScorerOptions
from understudy.types.scores import Signal


@pytest.fixture(scope="module")
def scorer(qwen3: Path) -> Scorer:
    return Scorer("t", load_frozen(str(qwen3)))


def requests() -> list[ScoreRequest]:
    kinds = [(Signal.TOPK, 4), (Signal.SAMPLED, 0), (Signal.AT_IDS, 3), (Signal.HIDDEN, 0), (Signal.TOPK, 2)]
    mixed = [request_of(random_items(3, seed, signal, k)) for seed, (signal, k) in enumerate(kinds)]
    return [*mixed, request_of(random_items(1, 9, Signal.HIDDEN) + random_items(2, 10, Signal.TOPK, 4))]


def assert_equal(a: ScoreReply, b: ScoreReply, atol: float = 0.0) -> None:
    assert a.keys == b.keys and a.signals == b.signals and a.k_N == b.k_N
    for name in ("position_counts_N", "digests_N", "scored_P", "ids"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_allclose(a.sampled_P, b.sampled_P, atol=atol)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)
    assert a.hidden.shape == b.hidden.shape


def test_the_reply_to_merged_requests_is_divided_into_the_reply_of_each(scorer: Scorer) -> None:
    asked = requests()
    for own, part in zip(map(scorer.score, asked), divided(scorer.score(merged(asked)), asked), strict=True):
        assert_equal(own, part, atol=1e-5)


@pytest.mark.parametrize("layout", [ScoringLayout.AUTO, ScoringLayout.PADDED, ScoringLayout.PACKED])
def test_lanes_score_requests_concurrently_with_the_bits_of_a_single_request(
    qwen3: Path, layout: ScoringLayout
) -> None:
    """A barrier ensures that three requests are in the model at once."""
    barrier = threading.Barrier(3, timeout=30)

    class WaitingScorer(Scorer):
        def begin(self, request: ScoreRequest, between: Callable[[], None] | None = None) -> QueuedRequest:
            if threading.current_thread() is not threading.main_thread():
                barrier.wait()
            return super().begin(request, between)

    scorer = WaitingScorer("t", load_frozen(str(qwen3)), ScorerOptions(layout=layout))
    alone = [scorer.score(request) for request in requests()]
    worker = ScoringWorker(scorer, RequestBatching.BY_REQUEST, lanes=3)
    worker.start()
    for _ in range(4):
        futures = [worker.submit(request) for request in requests()]
        for expected, future in zip(alone, futures, strict=True):
            found = future.result(60)
            assert_equal(expected, found, atol=0.0)
            np.testing.assert_array_equal(expected.hidden, found.hidden)
    worker.stop()
    assert worker.counts.requests == 24 and worker.counts.waiting_requests == 0


@pytest.mark.parametrize("batching", RequestBatching)
def test_requests_queued_together_each_get_their_own_reply(scorer: Scorer, batching: RequestBatching) -> None:
    worker = ScoringWorker(scorer, batching)
    futures = [worker.submit(request) for request in requests()]  # queued before the thread starts
    assert worker.counts.waiting_requests == 6
    worker.start()
    for request, future in zip(requests(), futures, strict=True):
        atol = 0.0 if batching is RequestBatching.BY_REQUEST else 1e-5
        assert_equal(scorer.score(request), future.result(60), atol)
    worker.stop()
    counts = worker.counts
    assert counts.requests == 6 and counts.waiting_requests == counts.waiting_tokens == 0
    assert counts.batches == (6 if batching is RequestBatching.BY_REQUEST else 1)
    assert counts.sequences == 18 and counts.busy_seconds > 0


class Fragile(Scorer):
    """Raises for the row with the key `poison`."""

    def begin(self, request: ScoreRequest, between: Callable[[], None] | None = None) -> QueuedRequest:
        if any("poison" in key for key in request.keys):
            raise RuntimeError("out of memory")
        return super().begin(request, between)


@pytest.mark.parametrize("batching", RequestBatching)
def test_a_request_that_raises_fails_alone(qwen3: Path, batching: RequestBatching) -> None:
    fragile = Fragile("t", load_frozen(str(qwen3)))
    worker = ScoringWorker(fragile, batching)
    asked = requests()[:3]
    asked[1].keys[0] = "poison"
    futures = [worker.submit(request) for request in asked]
    worker.start()
    with pytest.raises(RuntimeError, match="out of memory"):
        futures[1].result(60)
    for i in (0, 2):
        assert futures[i].result(60).keys == asked[i].keys
    assert worker.submit(asked[0]).result(60).keys == asked[0].keys
    worker.stop()
    assert worker.counts.failures == 1 and worker.counts.waiting_tokens == 0


def test_a_cancelled_request_is_not_scored(scorer: Scorer) -> None:
    worker = ScoringWorker(scorer, RequestBatching.BY_REQUEST)
    futures = [worker.submit(request) for request in requests()[:3]]
    assert futures[1].cancel()
    worker.start()
    assert futures[2].result(60)
    worker.stop()
    assert worker.counts.requests == 2 and worker.counts.waiting_requests == 0


@pytest.mark.parametrize("batching", RequestBatching)
def test_small_requests_are_scored_between_the_parts_of_a_large_request(
    qwen3: Path, batching: RequestBatching
) -> None:
    """The replies equal those of single requests, and the large requests are not starved."""
    scorer = Scorer("t", load_frozen(str(qwen3)), ScorerOptions(max_batch_tokens=512))
    large = [request_of(random_items(200, seed)) for seed in (50, 51)]
    small = [request_of(random_items(2, seed, Signal.TOPK, 4)) for seed in range(150)]
    alone = [scorer.score(request) for request in (*large, *small)]
    worker = ScoringWorker(scorer, batching)
    order: list[str] = []
    ended: list[float] = []

    def done(name: str) -> None:
        order.append(name)
        ended.append(time.perf_counter())

    def submit(request: ScoreRequest, name: str) -> Future[ScoreReply]:
        future = worker.submit(request)
        future.add_done_callback(lambda _: done(name))
        return future

    futures = [submit(request, "large") for request in large]
    futures += [submit(request, "small") for request in small]
    begun = time.perf_counter()
    worker.start()
    for expected, future in zip(alone, futures, strict=True):
        assert_equal(expected, future.result(60), 0.0 if batching is RequestBatching.BY_REQUEST else 1e-5)
    worker.stop()
    first = order.index("large")
    busy = worker.counts.busy_seconds
    assert 0.8 * (ended[first] - begun) < busy < ended[-1] - begun, (
        "each second of a large request must be counted once"
    )
    assert 0 < first < 150, (
        "a large request must end after some small ones, and before all of them have ended"
    )
    assert worker.counts.waiting_requests == worker.counts.waiting_tokens == 0
    assert worker.counts.requests == 152


class Device:
    """A device that executes its queued work only when the test calls `do`, one part at a time."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self._begun = self._done = 0
        self._changed = threading.Condition()

    def queue(self, name: str) -> None:
        with self._changed:
            self.queued.append(name)
            self._begun += 1
            self._changed.notify_all()

    def do(self, count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.queued) >= count, 30)
            del self.queued[:count]
            self._done += count
            self._changed.notify_all()

    def event(self) -> Event:
        after, device = self._begun, self

        class Reached:
            def query(self) -> bool:
                return device._done >= after

            def synchronize(self) -> None:
                with device._changed:
                    assert device._changed.wait_for(self.query, 30)

        return Reached()

    def holds(self, *names: str) -> None:
        """Waits until these parts are queued, and asserts that no more follow."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.queued) >= len(names), 30)
        time.sleep(0.1)
        assert self.queued == list(names)


class QueueingScorer(Scorer):
    """Scores on a CPU but reports its work as queued on `device`, as on a GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device = Device()

    def _queue_head(self, group: Any, *rest: Any) -> Any:
        part = super()._queue_head(group, *rest)
        self.device.queue("part" if group.signal is Signal.SAMPLED else "small")
        return part

    def _event(self) -> Event:
        return self.device.event()


def test_the_worker_queues_one_part_ahead_and_inserts_small_requests_between_parts(qwen3: Path) -> None:
    """A small request waits for two parts. While a reply is built, the device already has its next part."""
    options = ScorerOptions(max_batch_tokens=512)
    plain = Scorer("t", load_frozen(str(qwen3)), options)
    scorer = QueueingScorer("t", load_frozen(str(qwen3)), options)
    large = request_of(random_items(120, 50, Signal.SAMPLED))
    small = [request_of(random_items(2, seed, Signal.TOPK, 4)) for seed in range(3)]
    device = scorer.device
    worker = ScoringWorker(scorer, RequestBatching.BY_REQUEST)
    worker.start()
    whole = worker.submit(large)
    device.holds("part", "part")
    first = worker.submit(small[0])
    device.holds("part", "part")
    device.do()
    device.holds("part", "small", "part")
    device.do()
    assert not first.done()
    device.do()
    assert_equal(plain.score(small[0]), first.result(30))
    later = [worker.submit(request) for request in small[1:]]
    while not (whole.done() and all(future.done() for future in later)):
        if device.queued:
            device.do()
        time.sleep(0.001)
    for request, future in zip((large, *small[1:]), (whole, *later), strict=True):
        assert_equal(plain.score(request), future.result(30))
    worker.stop()
    assert worker.counts.waiting_requests == worker.counts.waiting_tokens == 0
    assert worker.counts.requests == 4
