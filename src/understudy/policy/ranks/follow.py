"""Rank 0 leads, ranks 1 … n−1 follow: the trainer calls one policy, however many ranks train.

    trainer ──update(batch)──> LeadingPolicy (rank 0) ══command, batch══> follow() on ranks 1 … n−1
                                     │                                        │
                                     └──── the same Policy call on every rank ┘

A command is one broadcast of rank 0: a JSON header with `do` and a running `number`, and named tensors.

| `do` | carries | a follower |
|---|---|---|
| `update`, `logprobs` | the batch, or the names of remote rows | makes the same call on its own `Policy` |
| `open_rows` | the address of remote rows | connects to it |
| `teacher_head` | a teacher's head, once | keeps it for later updates |
| `load_state`, `load_checkpoint` | the state, or where the checkpoint is | loads it |
| `named_weights`, `named_adapters`, `averaged_weights`, `state` | nothing | takes part in the gather |
| `skip_step`, `stop` | nothing | counts a step; returns from `follow` |

An error that follows from the batch (it does not fit, its loss is not finite) is raised on every rank. The
leader raises it to the trainer; followers report it and wait for the next command. A follower ends at
`stop`, or when the leader is gone.

If a batch has names (`BatchRef.meta`), only names and lengths are sent, and each rank fetches its own rows.
If any rank cannot, all ranks refuse the command, and the leader sends the rows themselves, from the run
directory.

A process group cannot tell why it is stuck: if one rank fails alone, the rest wait in a collective. So while
the leader waits for its own call it polls a `RankMonitor`, which observes the other ranks from outside the
group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from understudy.errors import PolicyError, RankLost, RowsUnreachable, UnderstudyError
from understudy.observability.faults import point
from understudy.policy.checkpoints.checkpoint import Checkpoint, CheckpointStore
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.forward.forward import Objective
from understudy.policy.policy import Policy
from understudy.policy.ranks.rank_thread import RankThread
from understudy.policy.ranks.shard import RankGroup, is_about_a_connection
from understudy.policy.ranks.wire import (
    batch_columns,
    batch_of_command,
    jagged_columns,
    name_columns,
    pack,
    unpack,
)
from understudy.policy.step import PolicySettings, StepResult
from understudy.policy.token_watch import TokenWatch
from understudy.types.batch_ref import BatchRef, RowSource
from understudy.types.jagged import Jagged
from understudy.types.loss import TeacherHead

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
"""How often the monitor is asked while a command is under way."""
_GRACE_SECONDS = 5.0
"""Ranks that fail from the same cause do so within this time."""
_NOTICE_SECONDS = 60.0
"""How long it may take to notice a lost rank: a cluster checks a machine's heartbeat every few seconds,
several times."""

Result = TypeVar("Result")


class RankMonitor(Protocol):
    """Observes ranks 1 … n−1 from outside the process group."""

    def lost(self) -> Exception | None:
        """The error of a rank that is gone, with its own message; None while all live."""
        ...

    def refused(self, number: int) -> Mapping[int, str]:
        """The ranks that could not carry out command `number`, and why."""
        ...

    def expect_exit(self) -> None:
        """From now on a rank that ends is not reported as lost."""
        ...

    def stop_soon(self, timeout_s: float, on_giving_up: Callable[[], None]) -> None:
        """The user asked to stop: from now on a rank that makes no progress for `timeout_s` counts as lost,
        and `on_giving_up` is called."""
        ...


class LeadingPolicy:
    """Rank 0's policy with the interface of `Policy`; every call is made on all ranks.

    A call blocks the caller's thread; the work runs on the rank's own thread (`RankThread`). The objective is
    not sent: followers were started with their own, built from the same recipe.
    """

    def __init__(
        self,
        policy: Policy,
        group: RankGroup,
        thread: RankThread | None = None,
        monitor: RankMonitor | None = None,
    ) -> None:
        self.policy = policy
        self._group = group
        self._thread = thread or RankThread()
        self._monitor = monitor
        self._heads: dict[str, TeacherHead] = {}
        self._number = 0
        self.bytes_sent = 0
        """Bytes of all commands, per follower."""
        self._broken: Exception | None = None

    @property
    def step(self) -> int:
        return self.policy.step

    @property
    def updates(self) -> int:
        return self.policy.updates

    @property
    def model(self) -> torch.nn.Module:
        return self.policy.model

    @property
    def settings(self) -> PolicySettings:
        return self.policy.settings

    @property
    def context_length(self) -> int:
        return self.policy.context_length

    @property
    def vocab_size(self) -> int:
        return self.policy.vocab_size

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def update(
        self,
        batch: BatchRef,
        objective: Objective,
        weights: Jagged | Sequence[torch.Tensor],
        max_tokens_per_microbatch: int = 8192,
        *,
        old_logprobs: Jagged | None = None,
        teacher_heads: Mapping[str, TeacherHead] | None = None,
        ends_step: bool = True,
        watch: TokenWatch | None = None,
    ) -> StepResult:
        whole = weights if isinstance(weights, Jagged) else Jagged.from_rows(list(weights))
        for name, head in (teacher_heads or {}).items():
            if self._heads.get(name) is not head:
                self._send_head(name, head)

        # Followers record their own rows' tokens, so they need the names. None left: no rank needs to record any.
        watched = watch.left if watch is not None else []

        def call(batch: BatchRef) -> StepResult:
            return self.policy.update(
                batch,
                objective,
                whole,
                max_tokens_per_microbatch,
                old_logprobs=old_logprobs,
                teacher_heads=teacher_heads,
                ends_step=ends_step,
                watch=watch if watched else None,
            )

        command = {
            "do": "update",
            "max_tokens": max_tokens_per_microbatch,
            "ends_step": ends_step,
            "watch": watched,
        }
        return self._on_batch(command, batch, call, weights=whole, old_logprobs=old_logprobs)

    def skip_step(self) -> None:
        self._on_all_ranks({"do": "skip_step"}, self.policy.skip_step)

    def logprobs(
        self, batch: BatchRef, max_tokens_per_microbatch: int = 8192, temperature: float = 1.0
    ) -> Jagged:
        command = {"do": "logprobs", "max_tokens": max_tokens_per_microbatch, "temperature": temperature}
        return self._on_batch(
            command, batch, lambda batch: self.policy.logprobs(batch, max_tokens_per_microbatch, temperature)
        )

    def open_rows(self, address: str) -> None:
        """Tells the followers where the rows of every later batch with names are."""
        self._on_all_ranks({"do": "open_rows", "address": address}, lambda: None)

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return self._on_all_ranks({"do": "named_weights"}, self.policy.named_weights)

    def named_adapters(self) -> list[tuple[str, torch.Tensor]]:
        return self._on_all_ranks({"do": "named_adapters"}, self.policy.named_adapters)

    def averaged_weights(self) -> list[tuple[str, torch.Tensor]]:
        return self._on_all_ranks({"do": "averaged_weights"}, self.policy.averaged_weights)

    def state(self) -> PolicyState:
        return self._on_all_ranks({"do": "state"}, self.policy.state)

    def load_state(self, state: PolicyState) -> None:
        """Sends a whole state to every rank; `load_checkpoint` avoids that traffic if the ranks share a file
        system."""
        self._on_all_ranks(
            {"do": "load_state", "progress": dict(state.progress)},
            lambda: self.policy.load_state(state),
            state.tensors(),
        )

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Followers read the checkpoint from disk; rank 0 has read it already."""
        root = str(checkpoint.path.resolve().parent)
        self._on_all_ranks(
            {"do": "load_checkpoint", "root": root, "step": checkpoint.step},
            lambda: self.policy.load_state(checkpoint.policy),
        )

    def expect_exit(self) -> None:
        """The run is ending: from now on a rank that ends is not an error."""
        if self._monitor is not None:
            self._monitor.expect_exit()

    def stop_soon(self, timeout_s: float, on_giving_up: Callable[[], None]) -> None:
        """The user asked to stop; `on_giving_up` is called if a rank then makes no progress for
        `timeout_s`."""
        if self._monitor is not None:
            self._monitor.stop_soon(timeout_s, on_giving_up)

    def close(self) -> None:
        """Tells the followers to stop. Does nothing if the group is broken, and gives up after a few seconds
        if it breaks now: the launcher ends followers that did not get the command."""
        if self._broken is None:
            self._number += 1
            message = pack({"do": "stop", "number": self._number}, {})
            wait([self._thread.submit(lambda: _broadcast(self._group, message))], timeout=_GRACE_SECONDS)

    def _send_head(self, name: str, head: TeacherHead) -> None:
        """Sends a teacher's head once: it is by far the largest part of a command."""
        facts = {"softcap": head.softcap, "logit_scale": head.logit_scale, "temperature": head.temperature}
        tensors = {"weight_VH": head.weight_VH} | ({} if head.bias_V is None else {"bias_V": head.bias_V})
        self._on_all_ranks({"do": "teacher_head", "name": name, "facts": facts}, lambda: None, tensors)
        self._heads[name] = head

    def _on_batch(
        self,
        command: Mapping[str, Any],
        batch: BatchRef,
        call: Callable[[BatchRef], Result],
        **others: Jagged | None,
    ) -> Result:
        """A command about rows: by name if the ranks can fetch them, else with all their columns."""
        reason = ""
        if batch.meta is not None:
            names, tensors = name_columns(batch, batch.meta, **others)
            try:
                return self._on_all_ranks({**command, "names": names}, lambda: call(batch), tensors)
            except RowsUnreachable as error:
                reason = str(error)
        here = batch.from_disk(reason)
        plain, tensors = batch_columns(here)
        for name, column in others.items():
            tensors |= jagged_columns(name, column)
        return self._on_all_ranks({**command, "batch": plain}, lambda: call(here), tensors)

    def _on_all_ranks(
        self,
        head: Mapping[str, Any],
        call: Callable[[], Result],
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> Result:
        """Sends the command to all ranks and runs this rank's part of it on its thread."""
        if self._broken is not None:
            raise self._broken
        self._number = number = self._number + 1

        def job() -> Result:
            message = pack({**head, "number": number}, tensors or {})
            self.bytes_sent += len(message)
            _broadcast(self._group, message)
            return call()

        future = self._thread.submit(job)
        while not wait([future], timeout=_POLL_SECONDS).done:
            trouble = self._trouble(number)
            if trouble is not None and not wait([future], timeout=_GRACE_SECONDS).done:
                self._broken = trouble
                raise trouble
        return self._outcome(future, number)

    def _outcome(self, future: Future[Result], number: int) -> Result:
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, UnderstudyError):
            self._broken = self._out_of_step(number)
            raise error
        # Most likely a broken connection. The rank that broke it has the better error message, once it is
        # known to be gone.
        broke = is_about_a_connection(error)
        cause = self._poll(
            lambda: self._monitor.lost() if self._monitor else None,
            _NOTICE_SECONDS if broke else _GRACE_SECONDS,
        )
        if cause is None and broke and self._monitor is not None:
            cause = RankLost(
                f"the connection to another rank broke, and no rank is known to be gone: {error}"
            )
        self._broken = cause or PolicyError(f"rank 0 failed in the midst of a command: {error}")
        raise cause or error

    def _out_of_step(self, number: int) -> Exception | None:
        """After rank 0 refused a command: None once every follower refused it too, because then all ranks
        are in step."""
        monitor = self._monitor
        if monitor is None:
            return None
        # `or None`: `_poll` looks again until it gets something else.
        alike = self._poll(lambda: len(monitor.refused(number)) == self._group.size - 1 or None)
        return (
            None
            if alike
            else PolicyError("rank 0 failed alone and left the other ranks behind; resume the run")
        )

    def _poll(self, look: Callable[[], Result | None], seconds: float = _GRACE_SECONDS) -> Result | None:
        deadline = time.monotonic() + seconds
        while (found := look()) is None and time.monotonic() < deadline and self._monitor is not None:
            time.sleep(_POLL_SECONDS / 4)
        return found

    def _trouble(self, number: int) -> Exception | None:
        if self._monitor is None:
            return None
        gone = self._monitor.lost()
        if gone is not None:
            return gone
        for rank, reason in self._monitor.refused(number).items():
            return PolicyError(f"{reason} (on rank {rank} of {self._group.size})")
        return None


def follow(
    policy: Policy,
    objective: Objective,
    group: RankGroup,
    refuse: Callable[[int, str], None] | None = None,
    open_rows: Callable[[str], RowSource] | None = None,
) -> None:
    """Makes the leader's calls on this rank until `stop`. If the leader is lost, the wait ends with a
    RuntimeError.

    `refuse(number, reason)` reports to the leader's monitor that a command failed here; `open_rows(address)`
    connects to the rows that commands name.
    """
    heads: dict[str, TeacherHead] = {}
    source: RowSource | None = None
    while True:
        head, tensors = unpack(_broadcast(group))
        if head["do"] == "stop":
            return
        point("rank.after_command")
        try:
            if head["do"] == "open_rows":
                assert open_rows is not None
                source = open_rows(head["address"])
            else:
                _execute(policy, objective, heads, head, tensors, source)
        except UnderstudyError as error:
            logger.warning("rank %d: %s", group.rank, error)
            if refuse is not None:
                refuse(head["number"], str(error))


def _execute(
    policy: Policy,
    objective: Objective,
    heads: dict[str, TeacherHead],
    head: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
    source: RowSource | None,
) -> None:
    match head["do"]:
        case "update":
            batch, others = batch_of_command(head, tensors, source)
            weights, old = others["weights"], others.get("old_logprobs")
            policy.update(
                batch, objective, weights, head["max_tokens"], old_logprobs=old, teacher_heads=heads,
                ends_step=head["ends_step"], watch=TokenWatch(head["watch"]) if head["watch"] else None,
            )  # fmt: skip
        case "skip_step":
            policy.skip_step()
        case "logprobs":
            batch, _ = batch_of_command(head, tensors, source)
            policy.logprobs(batch, head["max_tokens"], head["temperature"])
        case "named_weights":
            policy.named_weights()
        case "named_adapters":
            policy.named_adapters()
        case "averaged_weights":
            policy.averaged_weights()
        case "state":
            policy.state()
        case "load_checkpoint":
            policy.load_state(CheckpointStore(head["root"]).load(head["step"]).policy)
        case "load_state":
            policy.load_state(PolicyState.of_tensors(tensors, head["progress"]))
        case "teacher_head":
            weight_VH, bias_V = tensors["weight_VH"].to(policy.device), tensors.get("bias_V")
            bias_V = bias_V if bias_V is None else bias_V.to(policy.device)
            heads[head["name"]] = TeacherHead(weight_VH=weight_VH, bias_V=bias_V, **head["facts"])


def _broadcast(group: RankGroup, message: bytes | None = None) -> bytes | memoryview:
    """Broadcasts rank 0's bytes; returns them on every rank."""
    size = torch.tensor([len(message) if message is not None else 0])
    dist.broadcast(size, src=0, group=group.host)
    if message is None:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    else:
        buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    dist.broadcast(buffer, src=0, group=group.host)
    return buffer.numpy().data if message is None else message
