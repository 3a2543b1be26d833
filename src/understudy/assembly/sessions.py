"""Opens what sessions need: agent loops (in this process or in workers), rewards, sampling.

open_sessions ──> SessionParts ──┬─> rollouts_of    sessions of training steps
                                 └─> evaluator_of   sessions of evaluations
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from understudy.assembly.engines import renderer_of, sampling_of
from understudy.assembly.inputs import Inputs
from understudy.assembly.prepare import Launch
from understudy.cluster.local import LocalProcesses
from understudy.config import DataConfig, DataPlaneConfig, RolloutConfig
from understudy.engines.base import Engine, Sampling
from understudy.planning.resolved import EngineSettings, RowFlow
from understudy.rollout.agents.registry import LoopChoice, Loops
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards, load_reward
from understudy.rollout.workers.connections import WORKER_MODULE, OpenLine, PipeWorker, WorkerListener
from understudy.rollout.workers.pool import LoopWorkers, Segments
from understudy.trainers.evaluation.evaluator import Evaluator
from understudy.trainers.produce.rollouts import LocalRollouts, Rollouts
from understudy.trainers.remote_rows.references import RemotePlane
from understudy.trainers.remote_rows.rollouts import MODULE as ROW_WORKER
from understudy.trainers.remote_rows.rollouts import RemoteRollouts, settings_of
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.trainers.row_columns import PARTITION
from understudy.trainers.system import RunState


@dataclass(frozen=True)
class SessionParts:
    """What the sessions of training steps and of evaluations run with."""

    renderer: Renderer
    sampling: Sampling
    loops: Loops
    rewards: Rewards


@dataclass(frozen=True, slots=True)
class RowWorkerSettings:
    """What workers need that write their rows themselves."""

    module: str
    """The module of the worker process."""
    segments: Segments
    """The data plane's permissions to write."""
    extra: bytes
    """Encoded settings for the worker."""


async def open_sessions(
    launch: Launch,
    inputs: Inputs,
    plane: Any,
    settings: EngineSettings,
    flow: RowFlow,
    data: DataConfig,
    dataplane: DataPlaneConfig,
    restarts: int,
) -> SessionParts:
    """`restarts`: how often a worker is restarted in a row. Workers on other machines get what they need to write
    rows themselves."""
    rollout, row_workers = settings.rollout, None
    renderer = renderer_of(settings, data, inputs.student)
    if flow.workers_write:
        encoded = settings_of(dataplane, data.reward, rollout.deadline_seconds, launch.run, plane, PARTITION)
        row_workers = RowWorkerSettings(ROW_WORKER, plane.writer_segments, encoded)
    loops = await open_loops(
        rollout,
        data,
        renderer,
        launch.run.path / "tokenizer",
        launch.processes,
        launch.stack,
        row_workers,
        restarts=restarts,
        notify=launch.view.note,
    )
    rewards = Rewards([load_reward(data.reward)] if data.reward else [], renderer)
    launch.stack.push_async_callback(rewards.close)
    return SessionParts(renderer, sampling_of(settings, inputs.student, inputs.usable), loops, rewards)


async def open_loops(
    rollout: RolloutConfig,
    data: DataConfig,
    renderer: Renderer,
    tokenizer_folder: Path,
    processes: LocalProcesses,
    stack: AsyncExitStack,
    row_workers: RowWorkerSettings | None = None,
    *,
    restarts: int,
    notify: Callable[[str], None] | None = None,
) -> Loops:
    """Agent loops that are ready to run; `stack` closes them.

    Workers read the tokenizer from `tokenizer_folder` in the run directory, so that all use the run's. With
    `row_workers` they write their rows themselves. `restarts`: how often a worker is restarted in a row. `notify` gets a message when a worker is restarted."""
    if rollout.workers == 0:
        here = LoopChoice(rollout.agent, rollout.agent_options)
        stack.push_async_callback(here.close)
        return here
    renderer.tokenizer.save_pretrained(tokenizer_folder)
    if renderer.pictures is not None:
        renderer.pictures.processor.save(tokenizer_folder)
    workers = LoopWorkers(
        rollout.workers,
        tokenizer=tokenizer_folder,
        agent=rollout.agent,
        context=renderer.context,
        reserve=rollout.max_new_tokens,
        options=rollout.agent_options,
        template_options=rollout.for_templates,
        max_prompt=data.max_prompt_tokens,
        truncate=data.overlong == "truncate_left",
        pictures=str(renderer.pictures.store.folder) if renderer.pictures is not None else "",
        own_code=type(renderer.tokenizer).__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}."),
        open_line=await _lines(
            processes, stack, WORKER_MODULE if row_workers is None else row_workers.module
        ),
        segments=None if row_workers is None else row_workers.segments,
        extra=b"" if row_workers is None else row_workers.extra,
        restarts=restarts,
        notify=notify,
    )
    stack.push_async_callback(workers.close)
    await workers.start()
    return workers


async def _lines(processes: LocalProcesses, stack: AsyncExitStack, module: str = WORKER_MODULE) -> OpenLine:
    """How workers are started and reached: on this machine, or where the launcher places them
    (`cluster.roles.workers`)."""
    if not processes.is_remote(_name(0)):
        return PipeWorker.open
    token = secrets.token_urlsafe(24)

    async def launch(number: int, address: str) -> int:
        await processes.stop(_name(number))
        arguments = ["--call", address, "--number", str(number)]
        # The token goes through the environment: command lines are readable by every user of the machine.
        child = await processes.start(_name(number), module, arguments, {"UNDERSTUDY_TOKEN": token})
        return int(child.ready["pid"])

    async def dismiss(number: int) -> None:
        await processes.stop(_name(number))

    def lives(number: int) -> bool:
        child = processes.children.get(_name(number))
        return child is not None and child.alive

    board = WorkerListener(launch, dismiss, lives, token)
    await board.listen(processes.address)
    stack.push_async_callback(board.close)
    return board.open


def _name(number: int) -> str:
    return f"rollout-worker-{number}"


def rollouts_of(
    sessions: SessionParts,
    state: RunState,
    remote_scoring: RemoteScoring | None,
    *,
    pictures: bool,
    session_facts: bool,
) -> Rollouts:
    """What runs the sessions of training steps: this process, or workers that score and write their rows themselves
    (`remote_scoring`). `session_facts`: whether a teacher's prompt needs what a session has found out."""
    loops, sampling = sessions.loops, sessions.sampling
    if remote_scoring is None:
        return LocalRollouts(
            loops,
            sessions.rewards,
            state.plane,
            sampling,
            state.spans,
            state.timings,
            pictures,
            session_facts,
        )
    assert isinstance(loops, LoopWorkers)
    remote = RemotePlane(state.plane, PARTITION, pictures)
    remote_scoring.open(loops, remote)
    return RemoteRollouts(loops, remote, state.spans, state.timings, sampling.candidates > 0)


def evaluator_of(sessions: SessionParts, engine: Engine, rollout: RolloutConfig, seed: int) -> Evaluator:
    return Evaluator(
        engine,
        sessions.loops,
        sessions.rewards,
        sessions.renderer,
        sessions.sampling,
        sessions.renderer.context,
        rollout.max_batch,
        rollout.deadline_seconds,
        seed,
        rollout.max_trajectory_tokens,
    )
