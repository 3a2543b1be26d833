"""Load balancing over the servers of one engine: session affinity, outstanding tokens, back-off.

States of a replica:  serving ──failures in a row, or at its own request──> resting ──back-off over──> serving

A session stays on the replica that has its prefix cached, unless that replica is resting. New sessions go
to the replica with the fewest outstanding tokens. A failed request adds its tokens to the replica's debt,
which decays. Without it a server that fails fast would look idle and receive all the traffic.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from understudy.errors import EngineError
from understudy.serving.endpoint import Endpoint

REST_AFTER = 3
"""Failures in a row."""
FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
DEBT_HALF_LIFE_S = 5.0
REMEMBERED_SESSIONS = 65_536


@dataclass(slots=True)
class EngineReplica:
    """One server or engine process: its address, load, failures and back-off."""

    name: str
    endpoint: Endpoint
    outstanding_tokens: int = 0
    sent_tokens: int = 0
    answers: int = 0
    """Valid answers, over all restarts."""
    failures: int = 0
    rests: int = 0
    """Back-offs since the last valid answer."""
    resting_until: float = 0.0
    """By the clock of `Replicas`; infinite while it is gone."""
    debt: float = 0.0
    """Tokens of failed requests, as of `debt_at`."""
    debt_at: float = 0.0
    label: str | None = ""
    """The name we gave the server for its weights; None if the server has no such route."""

    @property
    def is_gone(self) -> bool:
        """Whether its process or machine is known to be lost. It serves again after `Replicas.back`."""
        return self.resting_until == math.inf

    def weight(self, now: float) -> tuple[float, int]:
        return self.outstanding_tokens + self.debt * 0.5 ** (
            (now - self.debt_at) / DEBT_HALF_LIFE_S
        ), self.sent_tokens


class Replicas:
    """The replicas and their load. Called on the engine's event loop; the clock is injected for tests."""

    def __init__(self, endpoints: Sequence[Endpoint], clock: Callable[[], float] = time.monotonic) -> None:
        if not endpoints:
            raise EngineError("a remote engine needs at least one server address")
        self.all = [EngineReplica(f"replica-{i}", endpoint) for i, endpoint in enumerate(endpoints)]
        self._clock = clock
        self._homes: OrderedDict[str, EngineReplica] = OrderedDict()

    def pick(self, session: str, tokens: int) -> EngineReplica | None:
        """The replica to send to, its load increased by `tokens`; None while all of them rest."""
        now = self._clock()
        serving = [replica for replica in self.all if replica.resting_until <= now]
        if not serving:
            return None
        chosen = self._homes.get(session) if session else None
        if chosen is None or chosen not in serving:
            chosen = min(serving, key=lambda replica: replica.weight(now))
        if session:
            self._homes[session] = chosen
            self._homes.move_to_end(session)
            if len(self._homes) > REMEMBERED_SESSIONS:
                self._homes.popitem(last=False)
        chosen.outstanding_tokens += tokens
        chosen.sent_tokens += tokens
        return chosen

    def succeeded(self, replica: EngineReplica, tokens: int) -> None:
        replica.outstanding_tokens -= tokens
        replica.answers += 1
        replica.failures = replica.rests = 0
        replica.debt = 0.0

    def failed(self, replica: EngineReplica, tokens: int, wait: float = 0.0) -> None:
        """`wait`: seconds that the server itself asked to wait (`Retry-After`), which is not counted as a failure."""
        now = self._clock()
        replica.outstanding_tokens -= tokens
        replica.debt, replica.debt_at = replica.weight(now)[0] - replica.outstanding_tokens + tokens, now
        if wait:
            replica.resting_until = max(replica.resting_until, now + wait)
            return
        replica.failures += 1
        if replica.failures >= REST_AFTER and not replica.is_gone:
            rest = min(FIRST_REST_S * 2**replica.rests, LONGEST_REST_S)
            replica.rests, replica.failures, replica.resting_until = replica.rests + 1, 0, now + rest

    def withdrawn(self, replica: EngineReplica, tokens: int) -> None:
        """The caller cancelled the request, which says nothing about the replica's health."""
        replica.outstanding_tokens -= tokens

    @property
    def present(self) -> list[EngineReplica]:
        """All but those known to be gone. Resting replicas are included: they must receive new weights."""
        return [replica for replica in self.all if not replica.is_gone]

    def gone(self, replica: EngineReplica) -> None:
        replica.resting_until = math.inf

    def back(self, replica: EngineReplica) -> None:
        replica.resting_until, replica.failures, replica.rests, replica.debt = 0.0, 0, 0, 0.0

    def next_awake(self) -> float:
        """Seconds until the first resting replica serves again."""
        return max(0.0, min(replica.resting_until for replica in self.all) - self._clock())
