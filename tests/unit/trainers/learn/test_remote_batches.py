"""A step on a remote batch equals the step on local rows to the bit, for every kind of objective."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from learning_rig import batch_of, learner_of, recipe_of

from understudy.errors import RowsUnreachable
from understudy.trainers.learn.update import learn
from understudy.types.batch import Batch, BatchMeta
from understudy.types.batch_ref import STREAMS, RemoteBatch
from understudy.types.jagged import Jagged


class Rows:
    """A `RowSource` in memory that records what was fetched. With `works = False` only its disk answers."""

    def __init__(self, batch: Batch, works: bool = True) -> None:
        self.batch, self.works = batch, works
        self.fetched: list[tuple[str, ...]] = []
        self.from_disk_fields: list[tuple[str, ...]] = []

    def fetch(self, meta: BatchMeta) -> Batch:
        self.fetched.append(meta.fields)
        if not self.works:
            raise RowsUnreachable("the queue is gone")
        return self._cut(meta)

    def from_disk(self, meta: BatchMeta, reason: str) -> Batch:
        assert reason == "the queue is gone"
        self.from_disk_fields.append(meta.fields)
        return self._cut(meta)

    def _cut(self, meta: BatchMeta) -> Batch:
        """The columns named in `meta.fields`, and no others."""
        batch = self.batch.select([self.batch.keys.index(key) for key in meta.keys])
        absent: dict[str, Any] = {"media": (), "teacher_logprobs": None}
        return replace(batch, **{name: none for name, none in absent.items() if name not in meta.fields})


FIELDS = (*STREAMS, "teacher_logprobs")
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "groups": {},
    "mini-batches": {"trainer": {"epochs": 2, "mini_batch_size": 3}, "rollout": {"overlong": "drop"}},
    "correction": {"loss": {"correction": {"measure": True}}},
    "reference": {"loss": {"kl_coef": 0.1, "kl_in": "reward"}},
    "critic": {"loss": {"advantage": "gae"}, "critic": {"learning_rate": 1e-3}},
    "given answers": {
        "rollout": {"off_policy": 0.2}, "loss": {"sft_coef": 0.5, "correction": {"measure": True}}
    },
}  # fmt: skip
OWN_MODEL = {"correction", "reference", "critic", "mini-batches", "given answers"}
"""Recipes for which the trainer's process itself reads the rows' tokens."""


def remote(batch: Batch, source: Rows, fields: tuple[str, ...] = FIELDS) -> RemoteBatch:
    return RemoteBatch(
        BatchMeta("train", batch.keys, fields),
        tuple(batch.tokens.lengths.tolist()),
        batch.loss_lengths,
        source,
        rewards=batch.rewards,
        stop_reasons=batch.stop_reasons,
        origins=batch.origins,
    )


def with_given(batch: Batch) -> Batch:
    """The batch with every third row as a given answer."""
    given = [row % 3 == 0 for row in range(len(batch))]
    logprobs = [
        torch.full_like(one, float("nan")) if given[row] else one
        for row, one in enumerate(batch.behaviour_logprobs)
    ]
    origins = tuple("data" if one else "student" for one in given)
    return replace(batch, origins=origins, behaviour_logprobs=Jagged.from_rows(logprobs))


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_on_a_remote_batch_equals_the_step_on_local_rows_to_the_bit(name: str) -> None:
    recipe, batch = recipe_of(**RECIPES[name]), batch_of()
    if name == "given answers":
        batch = with_given(batch)
    source, local_system, remote_system = Rows(batch), learner_of(recipe), learner_of(recipe)
    local, found = learn(local_system, batch), learn(remote_system, remote(batch, source))
    assert (found.loss, found.grad_norm, found.row_losses) == (local.loss, local.grad_norm, local.row_losses)
    assert {n: m.result() for n, m in found.metrics.items()} == {
        n: m.result() for n, m in local.metrics.items()
    }
    weights = dict(local_system.policy.named_weights())
    assert all(torch.equal(weights[n], w) for n, w in remote_system.policy.named_weights())
    assert set(source.fetched) <= {FIELDS, STREAMS} and not source.from_disk_fields
    assert (STREAMS in source.fetched) <= (name in OWN_MODEL), (
        "without a model of its own the trainer must fetch only lengths"
    )


def test_the_trainers_own_columns_are_read_from_the_run_directory_when_the_queue_is_lost() -> None:
    source = Rows(batch_of(), works=False)
    there, here = remote(batch_of(), source).streams(), batch_of()
    assert torch.equal(there.tokens.values, here.tokens.values) and there.rewards == here.rewards
    assert source.from_disk_fields == [STREAMS]


@pytest.mark.parametrize("works", [True, False], ids=["queue", "run directory"])
def test_rows_fetched_by_the_trainer_include_their_pictures(works: bool) -> None:
    """A reference model reads the pictures too. The teacher's columns are left out."""
    batch = batch_of()
    batch = replace(
        batch,
        media=tuple((f"{row}.png",) for row in range(len(batch))),
        teacher_logprobs=batch.behaviour_logprobs,
    )
    found = remote(batch, Rows(batch, works), (*FIELDS, "media")).streams()
    assert found.media == batch.media and found.teacher_logprobs is None
    assert remote(batch, Rows(batch, works)).streams().media == ()
