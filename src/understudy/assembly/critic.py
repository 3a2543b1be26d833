"""Loads the critic and the reference model of a recipe, and starts a critic in its own process.

The critic's classes are in `trainers/critic/`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack

from understudy.assembly.cpu_threads import lanes_of
from understudy.cluster.local import LocalProcesses
from understudy.cluster.placement import DeviceKind
from understudy.config import CriticConfig, Recipe
from understudy.engines.hosted.client import HostChannel
from understudy.engines.replicas import Endpoint, Traffic
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir
from understudy.planning.seating import CRITIC, Seating, critic_device
from understudy.policy.critic import give_value_head
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule, ScheduleKind
from understudy.policy.policy import Policy
from understudy.policy.reference import FrozenModel
from understudy.policy.step import BadRows, PolicySettings
from understudy.trainers.critic.local import Critic
from understudy.trainers.critic.remote import CriticWatch, FarCritic
from understudy.trainers.models import load_model, resolve_device
from understudy.types.usable_ids import UsableIds

MODULE = "understudy.assembly.processes.critic"


class ComingCritic:
    """A critic's process that starts while the run starts its other parts. Created and awaited on the event
    loop."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDir,
        processes: LocalProcesses,
        seating: Seating,
        gpu_names: Sequence[str],
        stack: AsyncExitStack,
    ) -> None:
        self._recipe, self._processes, self._stack = recipe, processes, stack
        gpus = [gpu_names[index] for index in seating.gpus(CRITIC, 0)]
        device = "cuda:0" if gpus else _device_without_seat(recipe, seating)
        threads = str(recipe.run.threads or os.cpu_count() or 1)
        self._token = secrets.token_urlsafe(24)
        # The token goes through the environment: command lines are readable by every user of the machine.
        env = {"UNDERSTUDY_TOKEN": self._token, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        arguments = ["--run", str(run.path), "--device", device, "--bind", "127.0.0.1:0"]
        log = run.logs / f"{CRITIC}.log"
        self._said_before = log.stat().st_size if log.exists() else 0
        self._starting = asyncio.create_task(processes.start(CRITIC, MODULE, arguments, env))
        stack.push_async_callback(self._end)

    async def arrived(self, on_bad_rows: BadRows, view: LiveView) -> FarCritic:
        """The client of the critic, once its process is ready.

        If the critic is lost later, the calling task is cancelled and the stack raises the reason."""
        with view.work("waiting for the critic's process"):
            child = await self._starting
        elsewhere = self._processes.is_elsewhere(CRITIC)
        watch = CriticWatch(child, self._said_before, elsewhere=elsewhere)
        traffic = Traffic()
        channel = HostChannel(CRITIC, Endpoint(child.ready["url"], key=self._token), traffic)
        self._stack.push_async_callback(channel.close)
        watchers = await self._stack.enter_async_context(asyncio.TaskGroup())
        for task in (watch.watch(channel), watch.feel_pulse(channel)):
            self._stack.callback(watchers.create_task(task).cancel)

        def leave() -> None:
            watch.send_home()
            channel.give_up("the run ends")  # fails calls that still wait for an answer

        self._stack.callback(leave)
        return FarCritic(channel, watch, self._recipe.critic or CriticConfig(), on_bad_rows, traffic)

    async def _end(self) -> None:
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        await self._processes.stop(CRITIC)


def _device_without_seat(recipe: Recipe, seating: Seating) -> str:
    """The device of a critic without assigned GPUs: the CPU in a CPU pool, otherwise the recipe's choice.

    A CPU pool reserves no GPU for it, even if the machine has some."""
    claim = seating.claims.get(CRITIC)
    if claim is not None and claim.kind is DeviceKind.CPU:
        return "cpu"
    return str(resolve_device(critic_device(recipe)))


def critic_of(recipe: Recipe, on_bad_rows: BadRows | None, device: str | None = None) -> Critic | None:
    """The recipe's critic, loaded on `device` or the student's device. None if the advantage needs no
    critic."""
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
    """The frozen reference model of a recipe with `loss.kl_coef`."""
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
