"""One rank leads, the others follow: the trainer talks to a single policy, whatever the number of ranks.

    trainer ──update(batch)──> LeadingPolicy (rank 0) ══command, batch══> follow() on ranks 1 … n−1
                                     │                                        │
                                     └────────── the same Policy call on every rank ┘

A follower waits for commands and makes the same call on its own `Policy`. An error that follows from the batch (it does
not fit, its loss is not finite) arises on every rank alike: the leader raises it, followers wait for the next command.
A follower ends when it is told to or when the leader is gone.

Of a `FarBatch` only names and lengths travel: each rank fetches its own rows from where the batch says they are. Where one
of them cannot, all refuse the command alike, and the leader sends the rows themselves, from the run directory.

A group cannot say why it is stuck: a rank that failed alone leaves the others waiting in a collective. So the leader waits
for its own call with one eye on a `Lookout`, which sees the other ranks from outside the group.
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
from understudy.policy.ranks.shard import Group, is_about_a_connection
from understudy.policy.ranks.wire import batch_columns, far_columns, jagged_columns, pack, told_of, unpack
from understudy.policy.step import PolicySettings, StepResult
from understudy.types.far_batch import AnyBatch, FarBatch, RowSource
from understudy.types.jagged import Jagged
from understudy.types.loss import TeacherHead

logger = logging.getLogger(__name__)

_GLANCE_SECONDS = 0.2
_GRACE_SECONDS = 5.0
"""How far apart ranks may fail together."""
_NOTICE_SECONDS = 60.0
"""How long a lost rank may take to show as lost: a cluster looks for a machine's sign of life every few seconds, several times."""

Result = TypeVar("Result")


class Lookout(Protocol):
    """The other ranks, seen from outside their group."""

    def lost(self) -> Exception | None:
        """The error of a rank that is gone, in its own words; None while all live."""
        ...

    def refused(self, number: int) -> Mapping[int, str]:
        """The ranks that could not carry out command `number`, and why."""
        ...

    def send_home(self) -> None:
        """From now on a rank that ends is no loss."""
        ...

    def hurry(self, patience_s: float, on_giving_up: Callable[[], None]) -> None:
        """Somebody asked to stop: a rank that stands still is lost after so long, and `on_giving_up` called."""
        ...


class LeadingPolicy:
    """Rank 0's policy with the interface of `Policy`; every call is made on all ranks.

    The objective does not travel: followers were started with their own, built from the same recipe.
    """

    def __init__(
        self, policy: Policy, group: Group, thread: RankThread | None = None, lookout: Lookout | None = None
    ) -> None:
        self.policy = policy
        self._group = group
        self._thread = thread or RankThread()
        self._lookout = lookout
        self._heads: dict[str, TeacherHead] = {}
        self._number = 0
        self.bytes_sent = 0
        """To each of the other ranks, in commands."""
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
        batch: AnyBatch,
        objective: Objective,
        weights: Jagged | Sequence[torch.Tensor],
        max_tokens_per_microbatch: int = 8192,
        *,
        old_logprobs: Jagged | None = None,
        teacher_heads: Mapping[str, TeacherHead] | None = None,
        ends_step: bool = True,
    ) -> StepResult:
        whole = weights if isinstance(weights, Jagged) else Jagged.from_rows(list(weights))
        for name, head in (teacher_heads or {}).items():
            if self._heads.get(name) is not head:
                self._send_head(name, head)

        def call(batch: AnyBatch) -> StepResult:
            return self.policy.update(
                batch,
                objective,
                whole,
                max_tokens_per_microbatch,
                old_logprobs=old_logprobs,
                teacher_heads=teacher_heads,
                ends_step=ends_step,
            )

        command = {"do": "update", "max_tokens": max_tokens_per_microbatch, "ends_step": ends_step}
        return self._on_batch(command, batch, call, weights=whole, old_logprobs=old_logprobs)

    def skip_step(self) -> None:
        self._together({"do": "skip_step"}, self.policy.skip_step)

    def logprobs(
        self, batch: AnyBatch, max_tokens_per_microbatch: int = 8192, temperature: float = 1.0
    ) -> Jagged:
        command = {"do": "logprobs", "max_tokens": max_tokens_per_microbatch, "temperature": temperature}
        return self._on_batch(
            command, batch, lambda batch: self.policy.logprobs(batch, max_tokens_per_microbatch, temperature)
        )

    def open_rows(self, address: str) -> None:
        """Tells the other ranks where the rows of every `FarBatch` to come lie."""
        self._together({"do": "open_rows", "address": address}, lambda: None)

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return self._together({"do": "named_weights"}, self.policy.named_weights)

    def named_adapters(self) -> list[tuple[str, torch.Tensor]]:
        return self._together({"do": "named_adapters"}, self.policy.named_adapters)

    def averaged_weights(self) -> list[tuple[str, torch.Tensor]]:
        return self._together({"do": "averaged_weights"}, self.policy.averaged_weights)

    def state(self) -> PolicyState:
        return self._together({"do": "state"}, self.policy.state)

    def load_state(self, state: PolicyState) -> None:
        """Sends a whole state to every rank; where ranks share a file system, `load_checkpoint` spares the traffic."""
        tensors = {f"model:{name}": tensor for name, tensor in state.model.items()}
        tensors |= {f"optimizer:{name}": tensor for name, tensor in state.optimizer.items()}
        self._together(
            {"do": "load_state", "progress": dict(state.progress)},
            lambda: self.policy.load_state(state),
            tensors,
        )

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Every rank reads the checkpoint itself; this one has it already."""
        root = str(checkpoint.path.resolve().parent)
        self._together(
            {"do": "load_checkpoint", "root": root, "step": checkpoint.step},
            lambda: self.policy.load_state(checkpoint.policy),
        )

    def expect_the_end(self) -> None:
        """What ends from now on ends with the run: nobody is to be disturbed while it is put away."""
        if self._lookout is not None:
            self._lookout.send_home()

    def hurry(self, patience_s: float, on_giving_up: Callable[[], None]) -> None:
        """Somebody asked to stop; `on_giving_up` is called where a rank then stands still for so long."""
        if self._lookout is not None:
            self._lookout.hurry(patience_s, on_giving_up)

    def close(self) -> None:
        """Sends the followers home. Where the group is broken, or breaks over this, there is nobody to tell: whoever is gone by now is
        no loss, and whoever has not heard is ended."""
        if self._broken is None:
            self._number += 1
            message = pack({"do": "stop", "number": self._number}, {})
            wait([self._thread.submit(lambda: _broadcast(self._group, message))], timeout=_GRACE_SECONDS)

    def _send_head(self, name: str, head: TeacherHead) -> None:
        """A teacher's head travels once; it is by far the largest thing a step could carry."""
        facts = {"softcap": head.softcap, "logit_scale": head.logit_scale, "temperature": head.temperature}
        tensors = {"weight_VH": head.weight_VH} | ({} if head.bias_V is None else {"bias_V": head.bias_V})
        self._together({"do": "teacher_head", "name": name, "facts": facts}, lambda: None, tensors)
        self._heads[name] = head

    def _on_batch(
        self,
        command: Mapping[str, Any],
        batch: AnyBatch,
        call: Callable[[AnyBatch], Result],
        **others: Jagged | None,
    ) -> Result:
        """A command about rows: by name where ranks can fetch them, else with all their columns."""
        if isinstance(batch, FarBatch):
            told, tensors = far_columns(batch, **others)
            far = batch
            try:
                return self._together({**command, "far": told}, lambda: call(far), tensors)
            except RowsUnreachable as error:
                batch = far.bring(str(error))
        near = batch
        plain, tensors = batch_columns(near)
        for name, column in others.items():
            tensors |= jagged_columns(name, column)
        return self._together({**command, "batch": plain}, lambda: call(near), tensors)

    def _together(
        self,
        head: Mapping[str, Any],
        call: Callable[[], Result],
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> Result:
        """The command to all ranks, and this rank's own part of it on its thread."""
        if self._broken is not None:
            raise self._broken
        self._number = number = self._number + 1

        def job() -> Result:
            message = pack({**head, "number": number}, tensors or {})
            self.bytes_sent += len(message)
            _broadcast(self._group, message)
            return call()

        future = self._thread.submit(job)
        while not wait([future], timeout=_GLANCE_SECONDS).done:
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
        # Most likely a connection that broke; whoever broke it has the better words, once it is known to be gone.
        broke = is_about_a_connection(error)
        cause = self._patiently(
            lambda: self._lookout.lost() if self._lookout else None,
            _NOTICE_SECONDS if broke else _GRACE_SECONDS,
        )
        if cause is None and broke and self._lookout is not None:
            cause = RankLost(
                f"the connection to another rank broke, and no rank is known to be gone: {error}"
            )
        self._broken = cause or PolicyError(f"rank 0 failed in the midst of a command: {error}")
        raise cause or error

    def _out_of_step(self, number: int) -> Exception | None:
        """After this rank's refusal: None once all others refused the same command, for then all are in step."""
        lookout = self._lookout
        if lookout is None:
            return None
        alike = self._patiently(lambda: len(lookout.refused(number)) == self._group.size - 1 or None)
        return (
            None
            if alike
            else PolicyError("rank 0 failed alone and left the other ranks behind; resume the run")
        )

    def _patiently(self, look: Callable[[], Result | None], seconds: float = _GRACE_SECONDS) -> Result | None:
        deadline = time.monotonic() + seconds
        while (found := look()) is None and time.monotonic() < deadline and self._lookout is not None:
            time.sleep(_GLANCE_SECONDS / 4)
        return found

    def _trouble(self, number: int) -> Exception | None:
        if self._lookout is None:
            return None
        gone = self._lookout.lost()
        if gone is not None:
            return gone
        for rank, reason in self._lookout.refused(number).items():
            return PolicyError(f"{reason} (on rank {rank} of {self._group.size})")
        return None


def follow(
    policy: Policy,
    objective: Objective,
    group: Group,
    refuse: Callable[[int, str], None] | None = None,
    open_rows: Callable[[str], RowSource] | None = None,
) -> None:
    """Makes the leader's calls on this rank until it says stop. A lost leader ends the wait with a RuntimeError.

    `refuse(number, reason)` tells the leader's lookout that a command could not be carried out here; `open_rows(address)`
    connects to where rows lie that are told of by name.
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
                _obey(policy, objective, heads, head, tensors, source)
        except UnderstudyError as error:
            logger.warning("rank %d: %s", group.rank, error)
            if refuse is not None:
                refuse(head["number"], str(error))


def _obey(
    policy: Policy,
    objective: Objective,
    heads: dict[str, TeacherHead],
    head: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
    source: RowSource | None,
) -> None:
    match head["do"]:
        case "update":
            batch, others = told_of(head, tensors, source)
            weights, old = others["weights"], others.get("old_logprobs")
            policy.update(
                batch, objective, weights, head["max_tokens"], old_logprobs=old, teacher_heads=heads,
                ends_step=head["ends_step"],
            )  # fmt: skip
        case "skip_step":
            policy.skip_step()
        case "logprobs":
            batch, _ = told_of(head, tensors, source)
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
            model, optimizer = (
                {
                    name.removeprefix(f"{kind}:"): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(f"{kind}:")
                }
                for kind in ("model", "optimizer")
            )
            policy.load_state(PolicyState(model, optimizer, head["progress"]))
        case "teacher_head":
            weight_VH, bias_V = tensors["weight_VH"].to(policy.device), tensors.get("bias_V")
            bias_V = bias_V if bias_V is None else bias_V.to(policy.device)
            heads[head["name"]] = TeacherHead(weight_VH=weight_VH, bias_V=bias_V, **head["facts"])


def _broadcast(group: Group, message: bytes | None = None) -> bytes:
    """Rank 0's bytes on every rank."""
    size = torch.tensor([len(message) if message is not None else 0])
    dist.broadcast(size, src=0, group=group.host)
    if message is None:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    else:
        buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    dist.broadcast(buffer, src=0, group=group.host)
    return buffer.numpy().tobytes() if message is None else message
