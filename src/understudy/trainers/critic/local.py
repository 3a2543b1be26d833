"""The critic of a run: its values before a step, its own updates, and its state in a checkpoint.

ValueModel     the protocol a step uses
├── Critic     in the trainer's process, which is rank 0's where there are several ranks
└── RemoteCritic  a client of a `Critic` in its own process, on this or another machine (`remote.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from understudy.config import CriticConfig
from understudy.losses.value import ValueObjective
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.critic import token_values
from understudy.policy.policy import Policy, untouched
from understudy.policy.step import StepResult
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss_metrics import Metric, MetricTotal

_PREFIXES = ("critic.model/", "critic.optimizer/")


class ValueModel(Protocol):
    """The critic as a step uses it. Calls block. They come from one thread at a time, never from the event
    loop's."""

    @property
    def trains_alone(self) -> bool:
        """Whether this step trains the critic only."""
        ...

    @property
    def untouched(self) -> bool:
        """After a call that ran out of memory: whether weights and optimizer are unchanged."""
        ...

    def begin_values(self, rows: Callable[[], Batch], max_tokens: Callable[[], int]) -> Callable[[], Jagged]:
        """Returns a function that gives float32 [P] per row: the value of each loss-bearing token under the
        current weights.

        A critic in another process starts to compute now, one in this process when the function is called."""
        ...

    def update(self, batch: Batch, weights: Jagged, max_tokens: int, ends_step: bool) -> StepResult: ...

    def skip_step(self) -> None:
        """A trainer step without an update of the critic."""
        ...

    def state(self) -> PolicyState: ...

    def load_state(self, state: PolicyState) -> None: ...


class Critic:
    """A value model and its optimizer, in this process."""

    def __init__(self, policy: Policy, config: CriticConfig) -> None:
        self.policy = policy
        self.config = config
        self.objective = ValueObjective(token_values, config.value_clip)

    @property
    def trains_alone(self) -> bool:
        return self.policy.step < self.config.only_steps

    @property
    def untouched(self) -> bool:
        return untouched(self.policy)

    def begin_values(self, rows: Callable[[], Batch], max_tokens: Callable[[], int]) -> Callable[[], Jagged]:
        return lambda: self.values(rows(), max_tokens())

    def values(self, batch: Batch, max_tokens: int) -> Jagged:
        return self.policy.read(batch, token_values, max_tokens)

    def update(self, batch: Batch, weights: Jagged, max_tokens: int, ends_step: bool) -> StepResult:
        return self.policy.update(batch, self.objective, weights, max_tokens, ends_step=ends_step)

    def skip_step(self) -> None:
        self.policy.skip_step()

    def state(self) -> PolicyState:
        return self.policy.state()

    def load_state(self, state: PolicyState) -> None:
        self.policy.load_state(state)


def critic_metrics(batch: Batch, result: StepResult) -> dict[str, Metric]:
    """Metrics of the critic's values before the step, and of its updates."""
    assert batch.values is not None and batch.returns is not None
    values_N, returns_N = batch.values.values.double(), batch.returns.values.double()
    spread = float(returns_N.var(correction=0))
    explained = 1.0 - float((returns_N - values_N).var(correction=0)) / spread if spread > 0 else 0.0
    numbers = {
        "critic/values/mean": float(values_N.mean()),
        "critic/returns/mean": float(returns_N.mean()),
        "critic/vf_explained_var": explained,
        "critic/grad_norm": result.grad_norm,
        "critic/lr": result.learning_rate,
    }
    return {**result.metrics, **{name: MetricTotal(value) for name, value in numbers.items()}}


def critic_state(state: PolicyState) -> PolicyState:
    """The critic's part of a state from `training_state`."""
    return PolicyState.of_tensors(state.optimizer, state.progress["critic"], *_PREFIXES)


def critic_tensors(state: PolicyState) -> dict[str, torch.Tensor]:
    """A critic's own state as it is stored among the optimizer's tensors of a run's state."""
    return state.tensors(*_PREFIXES)
