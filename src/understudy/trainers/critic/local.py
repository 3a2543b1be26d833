"""The critic of a run: values before a step, its own updates beside the student's, its place in a checkpoint.

ValueModel  what a step asks of a critic, wherever it is
├── Critic     whole in the trainer's process, with the leading rank where there are several
└── FarCritic  the same `Critic` in a process of its own, here or on another machine (`remote.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from understudy.assembly.cpu_threads import lanes_of
from understudy.config import CriticConfig, Recipe
from understudy.errors import CheckpointError
from understudy.losses.value import ValueObjective
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.critic import give_value_head, token_values
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule, ScheduleKind
from understudy.policy.policy import Policy
from understudy.policy.reference import FrozenModel
from understudy.policy.step import BadRows, PolicySettings, StepResult
from understudy.trainers.learn.out_of_memory import untouched
from understudy.trainers.models import load_model
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss_metrics import Metric, MetricTotal
from understudy.types.usable_ids import UsableIds

if TYPE_CHECKING:
    from understudy.trainers.system import System

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


def critic_of(recipe: Recipe, on_bad_rows: BadRows | None, device: str | None = None) -> Critic | None:
    """The critic this recipe asks for, loaded, on the student's device unless told; None where its advantages need none."""
    if recipe.loss.advantage != "gae":
        return None
    config, trainer = recipe.critic or CriticConfig(), recipe.trainer
    student = recipe.student
    loaded = load_model(
        config.model or student.model,
        dtype=config.dtype,
        device=device or student.device,
        trust_remote_code=student.trust_remote_code,
        revision=student.revision if config.model is None else None,
        attention=config.attention or student.attention,
    )
    settings = PolicySettings(
        schedule=Schedule(
            ScheduleKind(config.schedule), config.learning_rate, trainer.steps, config.warmup_steps
        ),
        adamw=AdamWSettings(
            weight_decay=config.weight_decay, grad_clip=config.grad_clip, kind=trainer.optimizer
        ),
        gradient_checkpointing=config.gradient_checkpointing,
        lanes=lanes_of(recipe) if loaded.device.type == "cpu" else 1,
    )
    return Critic(Policy(give_value_head(loaded.model), settings, on_bad_rows=on_bad_rows), config)


def reference_of(recipe: Recipe, usable: UsableIds | None = None) -> FrozenModel | None:
    """The frozen model a recipe with `kl_coef` keeps its student near."""
    if recipe.loss.kl_coef == 0:
        return None
    student, config = recipe.student, recipe.reference
    own = config is not None and config.model is not None
    loaded = load_model(
        config.model if config is not None and config.model else student.model,
        dtype=config.dtype if config is not None else student.dtype,
        device=student.device,
        trust_remote_code=student.trust_remote_code and not own,
        revision=None if own else student.revision,
        attention=(config.attention if config is not None else None) or student.attention,
    )
    return FrozenModel(loaded.model, lanes_of(recipe), usable)


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


def training_state(system: System) -> PolicyState:
    """Student and critic as one state. The critic's tensors lie with the optimizer's: nobody exports them by accident."""
    state = system.policy.state()
    if system.critic is None:
        return state
    own = system.critic.state()
    extra: dict[str, torch.Tensor] = {f"{_MODEL}{name}": tensor for name, tensor in own.model.items()}
    extra |= {f"{_OPTIMIZER}{name}": tensor for name, tensor in own.optimizer.items()}
    return replace(
        state,
        optimizer={**state.optimizer, **extra},
        # A run has one state of chance, the trainer's, wherever its critic sits.
        progress={**state.progress, "critic": {**own.progress, "random": state.progress["random"]}},
    )


def restore_critic(system: System, state: PolicyState) -> None:
    """Put the critic back from what `training_state` wrote."""
    found: Mapping[str, Any] | None = state.progress.get("critic")
    if (system.critic is None) != (found is None):
        raise CheckpointError(
            f"the checkpoint holds {'no critic' if found is None else 'a critic'}, this recipe has "
            f"{'one' if found is None else 'none'}; resume with the recipe the run was started with"
        )
    if system.critic is not None and found is not None:
        system.critic.load_state(critic_state(state))


def critic_state(state: PolicyState) -> PolicyState:
    """The critic's own part of what `training_state` wrote."""

    def under(prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in state.optimizer.items()
            if name.startswith(prefix)
        }

    return PolicyState(under(_MODEL), under(_OPTIMIZER), state.progress["critic"])
