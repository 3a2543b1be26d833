"""The jobs of one rank of a sharded run, each in a process of its own."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import psutil
import torch
from small_student import batch_of, cross_entropy, poisoned, qwen3, settings, token_mean, varied_batch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from understudy.errors import LossInputError, PolicyError, RowsUnreachable, UnderstudyError
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.lora import LoraSettings
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import LeadingPolicy, follow
from understudy.policy.ranks.shard import join, leave, whole
from understudy.policy.token_watch import TokenWatch
from understudy.types.batch import Batch, BatchMeta
from understudy.types.batch_ref import RemoteBatch
from understudy.weights.adapters import AdaptedModel


def run_rank(rank: int, size: int, folder: str, job: str, options: dict[str, Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    ranks = join(rank, size, f"file://{folder}/rendezvous")
    try:
        pipe.send(JOBS[job](ranks, folder, **options))
        if job == "fail_alone":
            os._exit(0)  # the group is broken on purpose; leaving it would wait for the other
    finally:
        leave()


def train(
    ranks: Any,
    folder: str,
    steps: int,
    rows: int = 13,
    dtype: str = "float32",
    resume: bool = False,
    lora: bool = False,
    adamw: dict[str, Any] | None = None,
) -> Any:
    """Losses, norms and metrics of a few steps; rank 0 saves the end state."""
    adapters = LoraSettings(rank=4, alpha=8.0) if lora else None
    wanted = settings(lora=adapters, **({"adamw": AdamWSettings(**adamw)} if adamw else {}))
    policy = Policy(qwen3(dtype=getattr(torch, dtype)), wanted, ranks=ranks)
    store = CheckpointStore(folder + "/checkpoints")
    if resume:
        policy.load_state(store.load().policy)
    lines = []
    for step in range(policy.step, policy.step + steps):
        batch = varied_batch(rows=rows, seed=step)
        before = policy.logprobs(batch, 40).values.tolist()
        result = policy.update(batch, cross_entropy, token_mean(batch), 40)
        nll = result.metrics["nll"].result()
        lines.append((result.loss, result.grad_norm, nll, result.row_losses, before, result.micro_batches))
    state = policy.state()
    weights = dict(policy.named_weights())
    first = ranks is None or ranks.rank == 0
    assert bool(state.model) == bool(state.optimizer) == first, (
        "ranks other than 0 only take part in the gather"
    )
    assert lora or not first or all(torch.equal(weights[name], state.model[name]) for name in weights)
    if lora:  # the weights that an engine computes from the adapters
        engines = AdaptedModel(qwen3(dtype=getattr(torch, dtype)))
        made = {name: tensor.detach() for name, tensor in engines.weights(policy.named_adapters())}
        assert made.keys() == weights.keys()
        assert all(torch.equal(made[name], weights[name]) for name in weights)
    if first:
        store.save(policy.step, state)
    return lines


def break_a_step(ranks: Any, folder: str, where: str) -> Any:
    """A poisoned objective: the error text, the keys of the rows caught, and whether a clean step still works."""
    caught: list[str] = []
    policy = Policy(qwen3(), settings(), on_bad_rows=lambda bad: caught.extend(bad.rows.keys), ranks=ranks)
    batch = varied_batch()
    bad_token = int(batch.tokens[5][batch.loss_mask[5]][0])
    before = {name: tensor.clone() for name, tensor in policy.named_weights()}
    try:
        policy.update(batch, poisoned(where, bad_token), token_mean(batch), 40)
    except PolicyError as error:
        message = str(error)
    else:
        return "the step went through", [], False
    untouched = all(torch.equal(before[name], tensor) for name, tensor in policy.named_weights())
    policy.update(batch, cross_entropy, token_mean(batch), 40)
    return message, sorted(caught), untouched


def lead_and_follow(ranks: Any, folder: str, steps: int) -> Any:
    """The caller uses rank 0 only; the others follow. Returns the leader's losses, and the last step of the others."""
    policy = Policy(qwen3(), settings(ema_decay=0.5), ranks=ranks)
    if ranks.rank != 0:
        follow(policy, cross_entropy, ranks)
        return policy.step
    leader = LeadingPolicy(policy, ranks)
    losses = []
    for step in range(steps):
        batch = varied_batch(seed=step)
        old = leader.logprobs(batch, 40)
        losses.append(leader.update(batch, cross_entropy, list(token_mean(batch)), 40, old_logprobs=old).loss)
        with suppress(PolicyError):
            leader.update(batch_of([[0, 0]]), cross_entropy, token_mean(batch_of([[0, 0]])))
        if step == 0:
            leader.averaged_weights()
            state = leader.state().detached()
            CheckpointStore(folder + "/checkpoints").save(1, state)
        if step == 1:
            leader.load_state(state)
            leader.load_checkpoint(CheckpointStore(folder + "/checkpoints").load(1))
    # A step of two updates, the second left out: one step more, on every rank.
    leader.update(batch, cross_entropy, token_mean(batch), 40, ends_step=False)
    leader.skip_step()
    leader.close()
    return losses


def gather_weights(ranks: Any, folder: str) -> Any:
    """Counts the collectives that gather all weights, and checks the weights against `full_tensor`."""
    policy = Policy(qwen3(), settings(), ranks=ranks)
    sharded = [one for one in policy.model.parameters() if isinstance(one, DTensor)]
    expected = [one.detach().full_tensor() for one in sharded]
    with CommDebugMode() as seen:
        found = [whole(one.detach()) for one in sharded]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return len(sharded), {str(name): count for name, count in seen.get_comm_counts().items()}


def watch_rows(ranks: Any, folder: str, keys: list[str]) -> Any:
    """What a step of two updates computed for each token of some rows, by key; of rank 0, or of one process alone."""
    policy = Policy(qwen3(), settings(), ranks=ranks)
    if ranks is not None and ranks.rank != 0:
        return follow(policy, cross_entropy, ranks)
    leader = policy if ranks is None else LeadingPolicy(policy, ranks)
    batch, watch = varied_batch(), TokenWatch(keys)
    for rows in (range(7), range(7, len(batch))):
        part = batch.select(list(rows))
        leader.update(part, cross_entropy, token_mean(part), 40, watch=watch)
    assert watch.left == []
    leader.update(batch, cross_entropy, token_mean(batch), 40, watch=watch)
    if ranks is not None:
        leader.close()
    return watch.columns()


class RowsInMemory:
    """Rows by key. It records the fetches and fails after a number of them."""

    def __init__(self, batch: Batch, fails_at: int = 1000) -> None:
        self.batch, self.fails_at = batch, fails_at
        self.fetched: list[list[str]] = []
        self.brought: list[str] = []

    def fetch(self, meta: BatchMeta) -> Batch:
        self.fetched.append(list(meta.keys))
        if len(self.fetched) > self.fails_at:
            raise RowsUnreachable("the queue is gone")
        return self.batch.select([self.batch.keys.index(key) for key in meta.keys])

    def from_disk(self, meta: BatchMeta, reason: str) -> Batch:
        self.brought.append(reason)
        return self.batch.select([self.batch.keys.index(key) for key in meta.keys])


def rows_by_name(ranks: Any, folder: str, fails_on: int = -1) -> Any:
    """Trains on remote batches: losses, what this rank fetched, and what the leader sent. Rank `fails_on` loses its queue."""
    policy = Policy(qwen3(), settings(), ranks=ranks)
    batch = varied_batch()
    source = RowsInMemory(batch, fails_at=3 if ranks.rank == fails_on else 1000)
    if ranks.rank != 0:
        follow(policy, cross_entropy, ranks, open_rows=lambda address: source)
        return source.fetched
    leader = LeadingPolicy(policy, ranks)
    leader.open_rows("there")
    remote = RemoteBatch(
        BatchMeta("train", batch.keys, ("tokens",)),
        tuple(batch.tokens.lengths.tolist()),
        batch.loss_lengths,
        source,
    )
    losses = []
    for number in range(3):
        given: Any = remote if number else remote.with_columns(advantages=token_mean(batch))
        old = leader.logprobs(given, 40)
        before = leader.bytes_sent
        losses.append(leader.update(given, cross_entropy, token_mean(batch), 40).loss)
        sent = leader.bytes_sent - before
        part = leader.update(given.select([4, 0, 9]), cross_entropy, token_mean(batch.select([4, 0, 9])), 40, old_logprobs=old.select([4, 0, 9]))  # fmt: skip
        losses += [part.loss, *part.row_losses, *old.values.tolist()]
    leader.close()
    return losses, sent, source.fetched, source.brought


class NotesInAFolder:
    """A rank monitor that reads the refusals of other ranks from a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def lost(self) -> Exception | None:
        return None

    def refused(self, number: int) -> dict[int, str]:
        note = self.folder / f"refused-{number}"
        return {1: note.read_text()} if note.exists() else {}

    def expect_exit(self) -> None:
        return


def fail_alone(ranks: Any, folder: str, who: int) -> Any:
    """One rank refuses a batch that the other one computes: the leader's errors for two updates, and the time they took."""

    def picky(*arguments: Any) -> Any:
        raise LossInputError(f"rank {ranks.rank} cannot use this")

    policy = Policy(qwen3(), settings(), ranks=ranks)
    objective = picky if ranks.rank == who else cross_entropy
    if ranks.rank != 0:

        def refuse(number: int, reason: str) -> None:
            (Path(folder) / "part").write_text(reason)
            (Path(folder) / "part").rename(Path(folder) / f"refused-{number}")

        with suppress(RuntimeError):  # the leader exits without a message
            follow(policy, objective, ranks, refuse)
        return None
    leader = LeadingPolicy(policy, ranks, monitor=NotesInAFolder(folder))
    batch, messages = varied_batch(), []
    started = time.monotonic()
    for _ in range(2):
        try:
            leader.update(batch, objective, token_mean(batch), 40)
        except UnderstudyError as error:
            messages.append(str(error))
    return messages, time.monotonic() - started


def gone_at_the_end(ranks: Any, folder: str) -> Any:
    """The seconds that the leader takes to close when the other rank has already exited."""
    note, policy = Path(folder) / "pid", Policy(qwen3(), settings(), ranks=ranks)
    if ranks.rank != 0:
        part = note.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.rename(note)  # complete as soon as it exists: the leader reads it at once
        return None
    while not note.exists():
        time.sleep(0.05)
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(int(note.read_text())).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
    leader, started = LeadingPolicy(policy, ranks, monitor=NotesInAFolder(folder)), time.monotonic()
    leader.close()
    return time.monotonic() - started


JOBS = {
    "fail_alone": fail_alone,
    "gather_weights": gather_weights,
    "gone_at_the_end": gone_at_the_end,
    "lead_and_follow": lead_and_follow,
    "rows_by_name": rows_by_name,
    "train": train,
    "watch_rows": watch_rows,
    "break_a_step": break_a_step,
}
