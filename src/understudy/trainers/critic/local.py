"""The critic of a run: values before a step, its own updates beside the student's, its place in a checkpoint.

ValueModel  what a step asks of a critic, wherever it is
├── Critic     whole in the trainer's process, with the leading rank where there are several
└── FarCritic  the same `Critic` in a process of its own, here or on another machine (`remote.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

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

if TYPE_CHECKING:
    pass


_MODEL, _OPTIMIZER = "critic.model/", "critic.optimizer/"


class ValueModel(Protocol):
    """A critic as a step sees it. Calls block, and are made from one thread at a time, never that of the event loop."""

    @property
    def alone(self) -> bool:
        """Whether this step trains the critic only."""
        ...

    @property
    def untouched(self) -> bool:
        """After a call that ran out of memory: whether it left everything as it was."""
        ...

    def begin_values(self, rows: Callable[[], Batch], max_tokens: Callable[[], int]) -> Callable[[], Jagged]:
        """Whoever gives float32 [P] per row: the value of each loss-bearing token under the current weights. A critic elsewhere
        computes them from now on, one in this process when they are asked for."""
        ...

    def update(self, batch: Batch, weights: Jagged, max_tokens: int, ends_step: bool) -> StepResult: ...

    def skip_step(self) -> None:
        """A trainer step that leaves the critic as it is."""
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
    def alone(self) -> bool:
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
    """What the critic knew before the step, and what its updates did."""
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
    """The critic's own part of what `training_state` wrote."""

    def under(prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in state.optimizer.items()
            if name.startswith(prefix)
        }

    return PolicyState(under(_MODEL), under(_OPTIMIZER), state.progress["critic"])
