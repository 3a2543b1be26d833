"""Loads the critic and the reference model of a run, and starts a critic in its own process.

The critic's classes are in `trainers/critic/`.
"""

from __future__ import annotations

import asyncio
import os
import secrets

from understudy.assembly.learner import load_source
from understudy.assembly.prepare import Launch
from understudy.cluster.placement import DeviceKind
from understudy.engines.hosted.client import HostChannel
from understudy.media.store import MediaStore
from understudy.observability.live import LiveView
from understudy.planning.resolved import CriticSettings, ModelSource
from understudy.planning.seating import CRITIC, Seating
from understudy.policy.critic import give_value_head
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule, ScheduleKind
from understudy.policy.policy import Policy
from understudy.policy.reference import ReferenceModel
from understudy.policy.step import BadRows, PolicySettings
from understudy.serving.endpoint import Endpoint, Traffic
from understudy.trainers.critic.local import Critic, ValueModel
from understudy.trainers.critic.remote import CriticWatch, RemoteCritic
from understudy.trainers.models import resolve_device
from understudy.types.usable_ids import UsableIds

MODULE = "understudy.assembly.processes.critic"


def start_critic(launch: Launch, settings: CriticSettings | None) -> StartingCritic | None:
    """Starts the critic's process, if it has one. It loads the critic while the other parts of the run start."""
    return StartingCritic(launch, settings) if settings is not None and settings.own_process else None


async def open_critic(
    launch: Launch, settings: CriticSettings | None, starting: StartingCritic | None, on_bad_rows: BadRows
) -> ValueModel | None:
    """The critic in its own process (`starting`), or in this process; None if the recipe has none."""
    if starting is not None:
        return await starting.ready(on_bad_rows, launch.view)
    return None if settings is None else await asyncio.to_thread(critic_of, settings, on_bad_rows)


class StartingCritic:
    """A critic's process that starts while the run starts its other parts. Created and awaited on the event
    loop."""

    def __init__(self, launch: Launch, settings: CriticSettings) -> None:
        processes, seating, stack = launch.processes, launch.seating, launch.stack
        self._settings, self._processes, self._stack = settings, processes, stack
        gpus = [launch.gpus[index] for index in seating.gpus(CRITIC, 0)]
        device = "cuda:0" if gpus else _device_without_seat(settings, seating)
        threads = str(settings.process_threads or os.cpu_count() or 1)
        self._token = secrets.token_urlsafe(24)
        # The token goes through the environment: command lines are readable by every user of the machine.
        env = {"UNDERSTUDY_TOKEN": self._token, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        arguments = ["--run", str(launch.run.path), "--device", device, "--bind", "127.0.0.1:0"]
        self._starting = asyncio.create_task(processes.start(CRITIC, MODULE, arguments, env))
        stack.push_async_callback(self._end)

    async def ready(self, on_bad_rows: BadRows, view: LiveView) -> RemoteCritic:
        """The client of the critic, once its process is ready.

        If the critic is lost later, the calling task is cancelled and the stack raises the reason."""
        with view.work("waiting for the critic's process"):
            child = await self._starting
        watch = CriticWatch(child)
        traffic = Traffic()
        channel = HostChannel(CRITIC, Endpoint(child.ready["url"], token=self._token), traffic)
        self._stack.push_async_callback(channel.close)
        watchers = await self._stack.enter_async_context(asyncio.TaskGroup())
        for task in (watch.watch_channel(channel), watch.check_health(channel)):
            self._stack.callback(watchers.create_task(task).cancel)

        def leave() -> None:
            watch.expect_exit()
            channel.give_up("the run ends")  # fails calls that still wait for an answer

        self._stack.callback(leave)
        return RemoteCritic(channel, watch, self._settings.config, on_bad_rows, traffic)

    async def _end(self) -> None:
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        await self._processes.stop(CRITIC)


def _device_without_seat(settings: CriticSettings, seating: Seating) -> str:
    """The device of a critic without assigned GPUs: the CPU in a CPU pool, otherwise the recipe's choice.

    A CPU pool reserves no GPU for it, even if the machine has some."""
    claim = seating.claims.get(CRITIC)
    if claim is not None and claim.kind is DeviceKind.CPU:
        return "cpu"
    return str(resolve_device(settings.process_device))


def critic_of(settings: CriticSettings, on_bad_rows: BadRows | None, device: str | None = None) -> Critic:
    """The critic, loaded on `device` or on the student's."""
    config, loaded = settings.config, load_source(settings.source, device)
    policy = PolicySettings(
        schedule=Schedule(
            ScheduleKind(config.schedule), config.learning_rate, settings.steps, config.warmup_steps
        ),
        adamw=AdamWSettings(
            weight_decay=config.weight_decay, grad_clip=config.grad_clip, kind=settings.optimizer
        ),
        gradient_checkpointing=config.gradient_checkpointing,
        lanes=settings.lanes if loaded.device.type == "cpu" else 1,
    )
    return Critic(Policy(give_value_head(loaded.model), policy, on_bad_rows=on_bad_rows), config)


def reference_of(
    source: ModelSource, lanes: int, usable: UsableIds | None = None, media: MediaStore | None = None
) -> ReferenceModel:
    """The frozen reference model of a run with `loss.kl_coef`. `media`: the run's pictures."""
    loaded = load_source(source)
    if media is not None:
        loaded = loaded.with_pictures(media, source.model, source.revision)
    return ReferenceModel(loaded.model, lanes, usable, loaded.pictures)
