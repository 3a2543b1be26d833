"""The scoring threads of a replica and the queue in front of them.

The forward runs here and not on the event loop, so /health and /metrics answer while a batch is being scored.
Usually there is one thread. A small model on a CPU scores several requests concurrently (`lanes`), because
its operations are too short to be split over threads.

A request of more than `max_batch_tokens` is large: it is scored in parts of at most so many tokens. Between two parts the
thread serves small requests that wait:

    device   part 0 │ part 1 │ small, small │ part 2 │ small │ part 3
    host       queue 1        queue small, 2  reply to small …

At most one part's tokens are served, and no more once that has taken as long as the last part. So a small request waits for
two parts on a GPU (one runs, one is queued) and for one on a CPU, and a large one gets at least half of the time. Only the
order of forwards changes and not what is in them, so scores have the same bits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from understudy.teacher.manifest import RequestBatching
from understudy.teacher.protocol import ScoreReply, ScoreRequest
from understudy.teacher.scoring.scorer import QueuedRequest, Scorer
from understudy.types.scores import Signal

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerCounts:
    """Counters since start, read by /metrics. `lock` guards them."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0
    positions: int = 0
    batches: int = 0
    failures: int = 0
    busy_seconds: float = 0.0
    counted_until: float = 0.0
    """While a batch is under way: up to when `busy_seconds` counts."""
    waiting_requests: int = 0
    waiting_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Job:
    """A request and the future of its reply."""

    request: ScoreRequest
    future: Future[ScoreReply]
    arrived: float

    @property
    def tokens(self) -> int:
        return len(self.request.tokens_T)


@dataclass(frozen=True, slots=True)
class _Running:
    """Jobs whose forward is queued on the device as one batch."""

    jobs: list[_Job]
    begun: QueuedRequest


class ScoringWorker:
    """Scores requests in arrival order on its own threads; the HTTP handler calls `submit` on the event loop.

    The next batch is queued before the last one is collected, so a GPU never waits for Python.
    """

    def __init__(self, scorer: Scorer, batching: RequestBatching, lanes: int = 1) -> None:
        self.scorer = scorer
        self.batching = batching
        self.counts = WorkerCounts()
        self._arrival = threading.Condition()
        """Guards `_small`, `_large` and `_stopping`."""
        self._small: deque[_Job] = deque()
        self._large: deque[_Job] = deque()
        self._stopping = False
        self._turn = threading.Condition()
        """Guards `_under_way` and `_changing`."""
        self._under_way = 0
        """Batches between `_begin` and `_finish`."""
        self._changing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"scoring-{lane}", daemon=True) for lane in range(lanes)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Scores what waits and ends the threads."""
        with self._arrival:
            self._stopping = True
            self._arrival.notify_all()
        for thread in self._threads:
            thread.join(timeout)

    def submit(self, request: ScoreRequest) -> Future[ScoreReply]:
        job = _Job(request, Future(), time.perf_counter())
        with self.counts.lock:
            self.counts.waiting_requests += 1
            self.counts.waiting_tokens += job.tokens
        with self._arrival:
            (self._large if self.scorer.is_large(request) else self._small).append(job)
            self._arrival.notify()
        return job.future

    def between_batches(self, change: Callable[[], None]) -> None:
        """Calls `change` while no batch is being scored. Waiting requests are scored after it. Blocks; calls
        must not overlap."""
        with self._turn:
            self._changing = True
            self._turn.wait_for(lambda: self._under_way == 0)
        try:
            change()
        finally:
            with self._turn:
                self._changing = False
                self._turn.notify_all()

    def _may_begin(self) -> bool:
        """Counts one more batch as under way; False while `between_batches` changes the weights."""
        with self._turn:
            if self._changing:
                return False
            if self._under_way == 0:
                with self.counts.lock:
                    self.counts.counted_until = time.perf_counter()
            self._under_way += 1
            return True

    def _ended(self) -> None:
        with self._turn:
            self._under_way -= 1
            self._turn.notify_all()

    def _run(self) -> None:
        running: deque[_Running] = deque()
        while (batch := self._next_batch(wait=not running)) or running:
            if not batch:
                self._finish(running.popleft())
                continue
            while not self._may_begin():
                while running:  # a change of weights waits for them
                    self._finish(running.popleft())
                with self._turn:
                    self._turn.wait_for(lambda: not self._changing)
            self._begin(batch, running)
            while len(running) > 1:
                self._finish(running.popleft())
            self._finish_ready(running)

    def _next_batch(self, *, wait: bool) -> list[_Job]:
        """The jobs to score together: a large one, or small ones. `wait` for one; none if the thread is to end."""
        with self._arrival:
            if wait:
                self._arrival.wait_for(lambda: self._small or self._large or self._stopping)
            if self._large and not (self._small and self._small[0].arrived < self._large[0].arrived):
                return [self._large.popleft()]
            return self._pop_small(self.scorer.options.max_batch_tokens)

    def _pop_small(self, most: int) -> list[_Job]:
        """The first small job, or with `by_arrival` the first ones with the same usable ids; at most so many tokens."""
        batch: list[_Job] = []
        while self._small and self._small[0].tokens <= most:
            if batch and self._small[0].request.usable != batch[0].request.usable:
                break
            batch.append(self._small.popleft())
            most -= max(batch[-1].tokens, 1)
            if self.batching is RequestBatching.BY_REQUEST:
                break
        return batch

    def _serve_small(self, running: deque[_Running], seconds: float) -> None:
        """Between two parts of a large job: begins small ones of at most one part's tokens, until `seconds` are over."""
        until = time.perf_counter() + seconds
        while running:  # the part that was queued last comes after them, so the device has work meanwhile
            self._finish(running.popleft())
        most = self.scorer.options.max_batch_tokens
        while most > 0 and self._may_begin():
            with self._arrival:
                batch = self._pop_small(most)
            if not batch:
                self._ended()
                return
            self._begin(batch, running)
            self._finish_ready(running)
            most -= sum(max(job.tokens, 1) for job in batch)
            if time.perf_counter() > until:
                return

    def _begin(self, batch: Sequence[_Job], running: deque[_Running]) -> None:
        """Queues the batch on the device. `_may_begin` has counted it."""
        # A client that disconnected (its deadline passed) has cancelled its future: the job is skipped.
        live = [job for job in batch if job.future.set_running_or_notify_cancel()]
        self._count_gone(batch, live)
        resumed = time.perf_counter()

        def between() -> None:
            nonlocal resumed
            self._serve_small(running, time.perf_counter() - resumed)
            resumed = time.perf_counter()

        try:
            if live:
                begun = self.scorer.begin(merged([job.request for job in live]), between)
                running.append(_Running(live, begun))
                return
        except Exception as error:
            self._fail(live, error)
        self._ended()

    def _finish(self, running: _Running) -> None:
        try:
            self._collect(running)
        finally:
            self._ended()

    def _finish_ready(self, running: deque[_Running]) -> None:
        while running and running[0].begun.done.query():
            self._finish(running.popleft())

    def _collect(self, running: _Running) -> None:
        try:
            reply = self.scorer.finish(running.begun)
        except Exception as error:
            self._fail(running.jobs, error)
            return
        self._count_done(running.jobs)
        for job, own in zip(running.jobs, divided(reply, [job.request for job in running.jobs]), strict=True):
            job.future.set_result(own)

    def _fail(self, jobs: Sequence[_Job], error: Exception) -> None:
        """Fails a single job.

        Of a merged batch each job is scored again on its own, so that only the bad ones fail.
        """
        if len(jobs) == 1:
            log.error("scoring %d sequences failed", len(jobs[0].request), exc_info=error)
            with self.counts.lock:
                self.counts.failures += 1
            self._count_done(jobs)
            jobs[0].future.set_exception(error)
            return
        for job in jobs:
            try:
                reply = self.scorer.score(job.request)
            except Exception as own_error:
                self._fail([job], own_error)
            else:
                self._count_done([job])
                job.future.set_result(reply)

    def _count_gone(self, batch: Sequence[_Job], live: Sequence[_Job]) -> None:
        with self.counts.lock:
            self.counts.waiting_requests -= len(batch) - len(live)
            self.counts.waiting_tokens -= sum(job.tokens for job in batch) - sum(job.tokens for job in live)

    def _count_done(self, jobs: Sequence[_Job]) -> None:
        tokens = sum(job.tokens for job in jobs)
        with self.counts.lock:
            now = time.perf_counter()
            self.counts.waiting_requests -= len(jobs)
            self.counts.waiting_tokens -= tokens
            self.counts.requests += len(jobs)
            self.counts.sequences += sum(len(job.request) for job in jobs)
            self.counts.tokens += tokens
            self.counts.positions += sum(len(job.request.positions_P) for job in jobs)
            self.counts.batches += 1
            # Batches overlap: each second is counted once.
            self.counts.busy_seconds += now - self.counts.counted_until
            self.counts.counted_until = now


def merged(requests: Sequence[ScoreRequest]) -> ScoreRequest:
    """The sequences of several requests, which name the same usable ids, as one request."""
    if len(requests) == 1:
        return requests[0]
    return ScoreRequest(
        keys=[key for request in requests for key in request.keys],
        signals=[signal for request in requests for signal in request.signals],
        k_N=[k for request in requests for k in request.k_N],
        token_counts_N=np.concatenate([request.token_counts_N for request in requests]),
        position_counts_N=np.concatenate([request.position_counts_N for request in requests]),
        tokens_T=np.concatenate([request.tokens_T for request in requests]),
        positions_P=np.concatenate([request.positions_P for request in requests]),
        ids=np.concatenate([request.ids for request in requests]),
        usable=requests[0].usable,
        media=_merged_media(requests),
    )


def _merged_media(requests: Sequence[ScoreRequest]) -> tuple[tuple[str, ...], ...]:
    if not any(request.media for request in requests):
        return ()
    return tuple(request.media_of(row) for request in requests for row in range(len(request)))


def divided(reply: ScoreReply, requests: Sequence[ScoreRequest]) -> list[ScoreReply]:
    """The reply to `merged(requests)`, split into one reply per request."""
    if len(requests) == 1:
        return [reply]
    replies = []
    row = position = candidate = state = 0
    for request in requests:
        rows = slice(row, row + len(request))
        counts = request.position_counts_N.tolist()
        positions = sum(counts)
        candidates = sum(n * k for n, k in zip(counts, request.k_N, strict=True))
        states = reply.hidden_size * sum(
            n for n, signal in zip(counts, request.signals, strict=True) if signal is Signal.HIDDEN
        )
        replies.append(
            ScoreReply(
                teacher=reply.teacher,
                keys=request.keys,
                signals=request.signals,
                k_N=request.k_N,
                position_counts_N=request.position_counts_N,
                digests_N=reply.digests_N[rows],
                scored_P=reply.scored_P[position : position + positions],
                sampled_P=reply.sampled_P[position : position + positions],
                ids=reply.ids[candidate : candidate + candidates],
                logprobs=reply.logprobs[candidate : candidate + candidates],
                hidden=reply.hidden[state : state + states],
                hidden_size=reply.hidden_size,
                version=reply.version,
            )
        )
        row, position = rows.stop, position + positions
        candidate, state = candidate + candidates, state + states
    return replies
