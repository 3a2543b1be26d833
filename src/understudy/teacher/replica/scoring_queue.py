"""The scoring threads of a replica and the queue in front of them.

The forward runs here and not on the event loop, so /health and /metrics answer while a batch is being scored.
Usually there is one thread. A small model on a CPU scores several requests concurrently (`lanes`), because
its operations are too short to be split over threads.

A request of many parts is not served before the small ones that come meanwhile: on a CPU the thread scores small
requests of together at most one part's tokens between two of its parts. So a small request waits for one part, and the
large one gets at least half of the time. No request shares a forward with another by that, so its bits stay the same.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby

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
    busy_until: float = 0.0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Job:
    """A request and the future of its reply."""

    request: ScoreRequest
    future: Future[ScoreReply]

    @property
    def tokens(self) -> int:
        return len(self.request.tokens_T)


@dataclass(frozen=True, slots=True)
class _Running:
    """Jobs whose forward is queued on the device as one batch."""

    jobs: list[_Job]
    begun: QueuedRequest
    started: float


class ScoringWorker:
    """Scores requests in arrival order on its own threads; the HTTP handler calls `submit` on the event loop.

    On CUDA the next batch is queued before the last one is collected, so the device never waits for Python.
    """

    def __init__(self, scorer: Scorer, batching: RequestBatching, lanes: int = 1) -> None:
        self.scorer = scorer
        self.batching = batching
        self.counts = WorkerCounts()
        self._ahead = 1 if scorer.frozen.device.type == "cuda" else 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._large: deque[_Job] = deque()
        """Taken from `_jobs`, where small ones were looked for; the next to be scored."""
        if scorer.frozen.device.type == "cpu" and not scorer.in_lockstep:
            scorer.between = self._score_small
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
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def submit(self, request: ScoreRequest) -> Future[ScoreReply]:
        job = _Job(request, Future())
        with self.counts.lock:
            self.counts.waiting_requests += 1
            self.counts.waiting_tokens += job.tokens
        self._jobs.put(job)
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
        with self._turn:
            if not self._changing:
                self._under_way += 1
            return not self._changing

    def _ended(self) -> None:
        with self._turn:
            self._under_way -= 1
            self._turn.notify_all()

    def _run(self) -> None:
        running: deque[_Running] = deque()
        stopping = False
        while not stopping:
            if running and self._jobs.empty():
                self._finish(running.popleft())
                continue
            batch, stopping = self._gather()
            for _, alike in groupby(batch, lambda job: job.request.usable):
                while not self._may_begin():
                    while running:  # a change of weights waits for them
                        self._finish(running.popleft())
                    with self._turn:
                        self._turn.wait_for(lambda: not self._changing)
                if (begun := self._begin(list(alike))) is not None:
                    running.append(begun)
                else:
                    self._ended()
            while len(running) > self._ahead:
                self._finish(running.popleft())
        while running:
            self._finish(running.popleft())

    def _gather(self) -> tuple[list[_Job], bool]:
        """The jobs to score together (one, or the waiting ones up to the token budget), and whether to
        stop."""
        batch: list[_Job] = []
        tokens = 0
        most = self.scorer.options.max_batch_tokens if self.batching is RequestBatching.BY_ARRIVAL else 1
        while tokens < most:
            try:
                job = self._large.popleft() if self._large else self._jobs.get(block=not batch)
            except (queue.Empty, IndexError):  # another lane was first
                break
            if job is None:
                return batch, True
            if batch and self.scorer.is_large(job.request):  # small ones would wait for it
                self._large.append(job)
                break
            batch.append(job)
            tokens += max(job.tokens, 1)
        return batch, False

    def _score_small(self) -> None:
        """Scores small requests that wait, each on its own, while a large one is under way."""
        tokens = 0
        while tokens < self.scorer.options.max_batch_tokens and not self._changing:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is None:
                self._jobs.put(None)
                return
            if self.scorer.is_large(job.request):
                self._large.append(job)
            elif (begun := self._begin([job])) is not None:
                self._collect(begun)
            tokens += job.tokens

    def _begin(self, batch: Sequence[_Job]) -> _Running | None:
        # A client that disconnected (its deadline passed) has cancelled its future: the job is skipped.
        live = [job for job in batch if job.future.set_running_or_notify_cancel()]
        self._count_gone(batch, live)
        if not live:
            return None
        started = time.perf_counter()
        try:
            begun = self.scorer.begin(merged([job.request for job in live]))
        except Exception as error:
            self._fail(live, error, started)
            return None
        return _Running(live, begun, started)

    def _finish(self, running: _Running) -> None:
        try:
            self._collect(running)
        finally:
            self._ended()

    def _collect(self, running: _Running) -> None:
        try:
            reply = self.scorer.finish(running.begun)
        except Exception as error:
            self._fail(running.jobs, error, running.started)
            return
        self._count_done(running.jobs, running.started)
        for job, own in zip(running.jobs, divided(reply, [job.request for job in running.jobs]), strict=True):
            job.future.set_result(own)

    def _fail(self, jobs: Sequence[_Job], error: Exception, started: float) -> None:
        """Fails a single job.

        Of a merged batch each job is scored again on its own, so that only the bad ones fail.
        """
        if len(jobs) == 1:
            log.error("scoring %d sequences failed", len(jobs[0].request), exc_info=error)
            with self.counts.lock:
                self.counts.failures += 1
            self._count_done(jobs, started)
            jobs[0].future.set_exception(error)
            return
        for job in jobs:
            now = time.perf_counter()
            try:
                reply = self.scorer.score(job.request)
            except Exception as own_error:
                self._fail([job], own_error, now)
            else:
                self._count_done([job], now)
                job.future.set_result(reply)

    def _count_gone(self, batch: Sequence[_Job], live: Sequence[_Job]) -> None:
        with self.counts.lock:
            self.counts.waiting_requests -= len(batch) - len(live)
            self.counts.waiting_tokens -= sum(job.tokens for job in batch) - sum(job.tokens for job in live)

    def _count_done(self, jobs: Sequence[_Job], started: float) -> None:
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
            # Batches overlap on CUDA and over lanes: each second is counted once.
            self.counts.busy_seconds += now - max(started, self.counts.busy_until)
            self.counts.busy_until = now


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
