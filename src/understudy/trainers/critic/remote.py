"""The client of a critic in its own process, and the monitor of that process.

    trainer: values, update ──command──> assembly/processes/critic.py, on this machine or on a
                            <──answer──  Ray pool (`cluster.roles.critic`)

A lost critic cannot be restarted alone, because its updates since the last checkpoint are lost with it. The
run goes back to that checkpoint, as for a lost rank (`run/restarts.py`), or ends with the last lines of the
critic's log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from understudy.config import CriticConfig
from understudy.engines.hosted.client import HostChannel, HostLost
from understudy.errors import CriticLost, EngineError, PolicyError, RankLost
from understudy.observability.report import many
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.ranks.wire import batch_columns, jagged_columns, jagged_from, pack, unpack
from understudy.policy.refused import RefusedRows
from understudy.policy.step import BadRows, StepResult
from understudy.serving.endpoint import Traffic
from understudy.serving.supervisor import BEAT_S, SILENCE_S, Monitor, StartedProcess
from understudy.trainers.critic.messages import (
    PATH,
    for_critic,
    parts,
    refusal_from,
    result_from,
    sizes,
)
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged

_NOTICE_SECONDS = 60.0
"""How long it may take until a lost process is reported as lost: a cluster waits for several missed
heartbeats of a machine."""
Answer = tuple[dict[str, Any], dict[str, torch.Tensor]]


class CriticWatch(Monitor):
    """Monitors the critic's process: whether it lives and answers /health. A critic that computes answers too."""

    def __init__(
        self, process: StartedProcess, *, beat_s: float = BEAT_S, silence_s: float = SILENCE_S
    ) -> None:
        super().__init__(CriticLost, beat_s=beat_s, silence_s=silence_s)
        self._answered = 0
        self._hurried = asyncio.Event()
        self.add(0, "the critic", process, mark=lambda: self._answered)

    def stop_soon(self, timeout_s: float, on_giving_up: Callable[[], None]) -> None:
        super().stop_soon(timeout_s, on_giving_up)
        self._hurried.set()

    async def watch_channel(self, channel: HostChannel) -> None:
        """As `watch`; also fails the requests that wait for an answer."""
        try:
            await self.watch()
        except RankLost as gone:
            channel.give_up(str(gone))
            raise

    async def check_health(self, channel: HostChannel) -> None:
        """Detects a stopped process, and a machine that is gone without closing its connections."""
        while True:
            self._answered += await channel.answers(SILENCE_S)
            if self._hurried.is_set():
                await asyncio.sleep(self.beat_s)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurried.wait(), self.beat_s)


class RemoteCritic:
    """A `ValueModel` that sends commands to the critic's process. Calls block, so the update's thread makes
    them."""

    def __init__(
        self,
        channel: HostChannel,
        watch: CriticWatch,
        config: CriticConfig,
        on_bad_rows: BadRows | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._channel, self._watch = channel, watch
        self._config, self._on_bad_rows = config, on_bad_rows
        self._loop = asyncio.get_running_loop()
        self.traffic = traffic or Traffic()
        self._step = 0
        self._untouched = False
        self._asked: tuple[str, float] | None = None

    @property
    def trains_alone(self) -> bool:
        return self._step < self._config.only_steps

    @property
    def untouched(self) -> bool:
        return self._untouched

    def expect_exit(self) -> None:
        """The run ends: from now on the end of the critic's process is expected."""
        self._watch.expect_exit()

    def stop_soon(self, timeout_s: float, on_giving_up: Callable[[], None]) -> None:
        """Called on a stop request. `on_giving_up` is called if the critic then does not answer for
        `timeout_s`."""
        self._watch.stop_soon(timeout_s, on_giving_up)

    def waiting(self, now: float) -> str | None:
        """The command under way and its age, for the report on a run without progress."""
        asked = self._asked
        return None if asked is None else f"{asked[0]} ({now - asked[1]:.0f} s)"

    def begin_values(self, rows: Callable[[], Batch], max_tokens: Callable[[], int]) -> Callable[[], Jagged]:
        batch = for_critic(rows())
        facts, columns = batch_columns(batch)
        head = {"do": "values", "batch": facts, "max_tokens": max_tokens()}
        answer = self._begin(f"values of {many(len(batch), 'row')}", head, columns)

        def values() -> Jagged:
            found = jagged_from("values", self._outcome(answer)[1])
            assert found is not None
            return found

        return values

    def update(self, batch: Batch, weights: Jagged, max_tokens: int, ends_step: bool) -> StepResult:
        facts, columns = batch_columns(for_critic(batch))
        columns |= jagged_columns("weights", weights)
        head = {"do": "update", "batch": facts, "max_tokens": max_tokens, "ends_step": ends_step}
        answer, _ = self._ask(f"an update on {many(len(batch), 'row')}", head, columns, (batch, weights))
        return result_from(answer["result"])

    def skip_step(self) -> None:
        self._ask("a step without an update", {"do": "skip_step"})

    def state(self) -> PolicyState:
        what = "its state"
        answer, _ = self._ask(what, {"do": "state"})
        tensors: dict[str, torch.Tensor] = {}
        for names in parts(answer["bytes"]):
            tensors |= self._ask(what, {"do": "part", "names": names})[1]
        return PolicyState.of_tensors(tensors, answer["progress"])

    def load_state(self, state: PolicyState) -> None:
        what, tensors = "taking a state", state.tensors()
        for names in parts(sizes(tensors)):
            self._ask(what, {"do": "take"}, {name: tensors[name] for name in names})
        self._ask(what, {"do": "load_state", "progress": dict(state.progress)})

    def _ask(
        self,
        what: str,
        head: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        learnt: tuple[Batch, Jagged] | None = None,
    ) -> Answer:
        return self._outcome(self._begin(what, head, tensors or {}), learnt)

    def _begin(
        self, what: str, head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> Future[bytes]:
        self._asked = (what, time.monotonic())
        message = pack(head, tensors)
        return asyncio.run_coroutine_threadsafe(self._channel.send(PATH, message), self._loop)

    def _outcome(self, asking: Future[bytes], learnt: tuple[Batch, Jagged] | None = None) -> Answer:
        """The answer to a command. `learnt`: the rows of an update, which are saved if they break it."""
        try:
            answer, found = unpack(asking.result())
        except HostLost as error:
            raise self._lost(error) from None
        except EngineError as error:  # a fault in the critic's process, whose log has the details
            raise PolicyError(str(error)) from None
        finally:
            self._asked = None
        step, self._step = self._step, int(answer["step"])
        if "refused" in answer:
            self._untouched = bool(answer["untouched"])
            if "rows" in answer and learnt is not None and self._on_bad_rows is not None:
                self._on_bad_rows(_refused_rows(*learnt, answer["rows"], step))
            raise refusal_from(answer["refused"])
        return answer, found

    def _lost(self, error: HostLost) -> RankLost:
        """The error for a broken connection. It waits for the monitor to find out why the process is gone."""
        deadline = time.monotonic() + _NOTICE_SECONDS
        while time.monotonic() < deadline and not self._watch.exit_expected:
            if (gone := self._watch.lost()) is not None:
                return gone
            time.sleep(0.05)
        return CriticLost(
            f"the connection to the critic broke, and its process is not known to be gone: {error}"
        )


def _refused_rows(batch: Batch, weights: Jagged, refused: Mapping[str, Any], step: int) -> RefusedRows:
    places = {key: row for row, key in enumerate(batch.keys)}
    rows = [places[key] for key in refused["keys"]]
    return RefusedRows(batch.select(rows), weights.select(rows), refused["reason"], step)
