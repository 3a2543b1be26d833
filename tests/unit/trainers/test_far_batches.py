"""A step on rows told by name is the step on the rows themselves, to the bit, whatever the objective needs of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learning_rig import batch_of, recipe_of, system_of

from understudy.errors import RowsUnreachable
from understudy.trainers.learn.update import learn
from understudy.types.batch import Batch, BatchMeta
from understudy.types.far_batch import STREAMS, FarBatch


class Rows:
    """A `RowSource` in memory: what was fetched of it, and whether it still answers."""

    def __init__(self, batch: Batch, works: bool = True) -> None:
        self.batch, self.works = batch, works
        self.fetched: list[tuple[str, ...]] = []
        self.brought: list[tuple[str, ...]] = []

    def fetch(self, meta: BatchMeta) -> Batch:
        self.fetched.append(meta.fields)
        if not self.works:
            raise RowsUnreachable("the queue is gone")
        return self.batch.select([self.batch.keys.index(key) for key in meta.keys])

    def bring(self, meta: BatchMeta, reason: str) -> Batch:
        assert reason == "the queue is gone"
        self.brought.append(meta.fields)
        return self.batch.select([self.batch.keys.index(key) for key in meta.keys])


FIELDS = (*STREAMS, "teacher_logprobs")
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "groups": {},
    "mini-batches": {"trainer": {"epochs": 2, "mini_batch_size": 3}, "rollout": {"overlong": "drop"}},
    "correction": {"loss": {"correction": {"measure": True}}},
    "reference": {"loss": {"kl_coef": 0.1, "kl_in": "reward"}},
    "critic": {"loss": {"advantage": "gae"}, "critic": {"learning_rate": 1e-3}},
}
OWN_MODEL = {"correction", "reference", "critic", "mini-batches"}
"""Those for which the trainer's process looks at the rows' tokens itself."""


def far(batch: Batch, source: Rows) -> FarBatch:
    return FarBatch(
        BatchMeta("train", batch.keys, FIELDS),
        tuple(batch.tokens.lengths.tolist()),
        batch.loss_lengths,
        source,
        rewards=batch.rewards,
        stop_reasons=batch.stop_reasons,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_by_name_is_the_step_itself(name: str) -> None:
    recipe, batch = recipe_of(**RECIPES[name]), batch_of()
    source, near_system, far_system = Rows(batch), system_of(recipe), system_of(recipe)
    near, found = learn(near_system, batch), learn(far_system, far(batch, source))
    assert (found.loss, found.grad_norm, found.row_losses) == (near.loss, near.grad_norm, near.row_losses)
    assert {n: m.result() for n, m in found.metrics.items()} == {
        n: m.result() for n, m in near.metrics.items()
    }
    weights = dict(near_system.policy.named_weights())
    assert all(torch.equal(weights[n], w) for n, w in far_system.policy.named_weights())
    assert set(source.fetched) <= {FIELDS, STREAMS} and not source.brought
    assert (STREAMS in source.fetched) <= (name in OWN_MODEL), "by itself the trainer needs lengths alone"


def test_what_the_trainer_needs_itself_comes_from_the_run_directory_when_the_queue_is_gone() -> None:
    source = Rows(batch_of(), works=False)
    there, here = far(batch_of(), source).streams(), batch_of()
    assert torch.equal(there.tokens.values, here.tokens.values) and there.rewards == here.rewards
    assert source.brought == [STREAMS]
