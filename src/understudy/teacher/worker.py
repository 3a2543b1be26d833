"""The thread that owns the model, and the queue in front of it.

The forward runs here and not on the event loop, so /health and /metrics answer while a batch is being scored.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from understudy.teacher.manifest import Batching
from understudy.teacher.protocol import ScoreReply, ScoreRequest
from understudy.teacher.scorer import Scorer
from understudy.types.scores import Signal

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerCounts:
    """Totals since start, read by /metrics."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0
    positions: int = 0
    batches: int = 0
    failures: int = 0
    busy_seconds: float = 0.0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Job:
    request: ScoreRequest
    future: Future[ScoreReply]

    @property
    def tokens(self) -> int:
        return len(self.request.tokens_T)


class ScoringWorker:
    def __init__(self, scorer: Scorer, batching: Batching) -> None:
        self.scorer = scorer
        self.batching = batching
        self.counts = WorkerCounts()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        self._jobs.put(None)
        self._thread.join(timeout)

    def submit(self, request: ScoreRequest) -> Future[ScoreReply]:
        job = _Job(request, Future())
        with self.counts.lock:
            self.counts.waiting_requests += 1
            self.counts.waiting_tokens += job.tokens
        self._jobs.put(job)
        return job.future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, stopping = self._gather(job)
            self._score(batch)
            if stopping:
                return

    def _gather(self, first: _Job) -> tuple[list[_Job], bool]:
        """The jobs to score together: one alone, or what is waiting up to the token budget."""
        batch, tokens = [first], first.tokens
        if self.batching is Batching.BY_ARRIVAL:
            while tokens < self.scorer.options.max_batch_tokens:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is None:
                    return batch, True
                batch.append(job)
                tokens += job.tokens
        return batch, False

    def _score(self, batch: list[_Job]) -> None:
        # A caller that went away (a client's deadline) cancelled its future: its work is not worth doing.
        live = [job for job in batch if job.future.set_running_or_notify_cancel()]
        started = time.perf_counter()
        try:
            replies = self._replies([job.request for job in live]) if live else []
        except Exception as error:
            if len(live) > 1:
                self._score_one_by_one(live)
            else:
                self._fail(live[0], error)
        else:
            for job, reply in zip(live, replies, strict=True):
                job.future.set_result(reply)
        self._count(batch, live, time.perf_counter() - started)

    def _score_one_by_one(self, jobs: Sequence[_Job]) -> None:
        """One bad request among merged ones must fail alone."""
        for job in jobs:
            try:
                job.future.set_result(self.scorer.score(job.request))
            except Exception as error:
                self._fail(job, error)

    def _fail(self, job: _Job, error: Exception) -> None:
        log.exception("scoring %d sequences failed", len(job.request))
        with self.counts.lock:
            self.counts.failures += 1
        job.future.set_exception(error)

    def _replies(self, requests: Sequence[ScoreRequest]) -> list[ScoreReply]:
        if len(requests) == 1:
            return [self.scorer.score(requests[0])]
        return divided(self.scorer.score(merged(requests)), requests)

    def _count(self, batch: Sequence[_Job], live: Sequence[_Job], seconds: float) -> None:
        with self.counts.lock:
            self.counts.waiting_requests -= len(batch)
            self.counts.waiting_tokens -= sum(job.tokens for job in batch)
            self.counts.requests += len(live)
            self.counts.sequences += sum(len(job.request) for job in live)
            self.counts.tokens += sum(job.tokens for job in live)
            self.counts.positions += sum(len(job.request.positions_P) for job in live)
            self.counts.batches += 1
            self.counts.busy_seconds += seconds


def merged(requests: Sequence[ScoreRequest]) -> ScoreRequest:
    """The sequences of several requests as one request."""
    return ScoreRequest(
        keys=[key for request in requests for key in request.keys],
        signals=[signal for request in requests for signal in request.signals],
        k_N=[k for request in requests for k in request.k_N],
        token_counts_N=np.concatenate([request.token_counts_N for request in requests]),
        position_counts_N=np.concatenate([request.position_counts_N for request in requests]),
        tokens_T=np.concatenate([request.tokens_T for request in requests]),
        positions_P=np.concatenate([request.positions_P for request in requests]),
        ids=np.concatenate([request.ids for request in requests]),
    )


def divided(reply: ScoreReply, requests: Sequence[ScoreRequest]) -> list[ScoreReply]:
    """The reply to `merged(requests)`, cut back into one per request."""
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
                judged_P=reply.judged_P[position : position + positions],
                sampled_P=reply.sampled_P[position : position + positions],
                ids=reply.ids[candidate : candidate + candidates],
                logprobs=reply.logprobs[candidate : candidate + candidates],
                hidden=reply.hidden[state : state + states],
                hidden_size=reply.hidden_size,
            )
        )
        row, position = rows.stop, position + positions
        candidate, state = candidate + candidates, state + states
    return replies
