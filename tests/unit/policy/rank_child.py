"""One rank of a sharded run, as a process of its own."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from small_student import batch_of, cross_entropy, poisoned, qwen3, settings, token_mean, varied_batch

from understudy.errors import PolicyError
from understudy.policy.checkpoint import CheckpointStore
from understudy.policy.follow import LeadingPolicy, follow
from understudy.policy.lora import LoraSettings
from understudy.policy.policy import Policy
from understudy.policy.shard import join, leave


def run_rank(rank: int, size: int, folder: str, job: str, options: dict[str, Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    ranks = join(rank, size, f"file://{folder}/rendezvous")
    try:
        pipe.send(JOBS[job](ranks, folder, **options))
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
) -> Any:
    """Losses, norms and metrics of a few steps; rank 0 saves the end state."""
    adapters = LoraSettings(rank=4, alpha=8.0) if lora else None
    policy = Policy(qwen3(dtype=getattr(torch, dtype)), settings(lora=adapters), ranks=ranks)
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
    assert lora or all(torch.equal(weights[name], state.model[name]) for name in weights)
    if ranks is None or ranks.rank == 0:
        store.save(policy.step, state)
    return lines


def break_a_step(ranks: Any, folder: str, where: str) -> Any:
    """A poisoned objective: the error text, the keys of the rows caught, and whether a clean step still works."""
    caught: list[str] = []
    policy = Policy(qwen3(), settings(), on_bad_rows=lambda rows, _: caught.extend(rows.keys), ranks=ranks)
    batch = varied_batch()
    bad_token = int(batch.tokens[5][batch.loss_mask[5]][0])
    before = {name: tensor.clone() for name, tensor in policy.named_weights()}
    try:
        policy.update(batch, poisoned(where, bad_token), token_mean(batch), 40)
    except PolicyError as error:
        said = str(error)
    else:
        return "the step went through", [], False
    untouched = all(torch.equal(before[name], tensor) for name, tensor in policy.named_weights())
    policy.update(batch, cross_entropy, token_mean(batch), 40)
    return said, sorted(caught), untouched


def lead_and_follow(ranks: Any, folder: str, steps: int) -> Any:
    """Only rank 0 is talked to; the others follow. Returns the leader's losses, and every rank's last weights."""
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
            leader.load_from(CheckpointStore(folder + "/checkpoints"), 1)
    leader.close()
    return losses


JOBS = {"lead_and_follow": lead_and_follow, "train": train, "break_a_step": break_a_step}
