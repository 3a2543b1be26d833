"""Launches a recipe as a new run, and resumes a run directory."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import torch

from understudy.assembly.backends import own_ray_cluster, processes_of
from understudy.assembly.build import build
from understudy.assembly.this_machine import gpu_names
from understudy.config import Recipe
from understudy.config.checks.capacity import capacity_notes
from understudy.config.recipe import Overrides
from understudy.dataplane.dead_letters import count_letters
from understudy.errors import (
    ConfigError,
    PolicyError,
    RankLost,
    RunDirectoryError,
    UnderstudyError,
    lacks_memory,
)
from understudy.observability.live import LiveView
from understudy.observability.logs import log_to
from understudy.observability.metrics import read_metrics
from understudy.observability.redact import redact
from understudy.observability.rundir import (
    RunDir,
    cannot_be_written,
    disk_failure,
    read_json,
    write_atomically,
)
from understudy.observability.watchdog import watched
from understudy.planning.objective import describe
from understudy.planning.preflight import preflight, require_extras
from understudy.planning.ray_seating import cpus_of_own_ray, ray_layout
from understudy.planning.resolved import is_deterministic
from understudy.planning.this_machine import seat_here
from understudy.policy.checkpoints.checkpoint import is_whole
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.run.changed_recipe import (
    Change,
    changed_recipe,
    last_checkpoint_step,
    refuse_cut_window,
    refuse_shorter,
)
from understudy.run.given import GivenRows
from understudy.run.gpu_sharing import share_gpus
from understudy.run.outcome import RunOutcome
from understudy.run.restarts import with_restarts
from understudy.run.running_servers import running_servers
from understudy.run.vitals import vitals, waits
from understudy.serving.process import is_full_memory
from understudy.serving.start_wait import wait_for_servers
from understudy.trainers.callbacks import CallbackRunner, Callbacks
from understudy.trainers.checkpoints import (
    finish_saving,
    forget_after,
    last_checkpoint,
    restore,
    verify_followers,
)
from understudy.trainers.critic.remote import RemoteCritic
from understudy.trainers.evaluation.evaluate import lacks_evaluation
from understudy.trainers.fully_async import train_fully_async
from understudy.trainers.prompt_data import PromptData, open_data
from understudy.trainers.row_columns import PARTITION
from understudy.trainers.stopping import STOP_WAIT_S, Interrupts
from understudy.trainers.sync import train_sync
from understudy.viewer.frozen import REPORT, write_report

logger = logging.getLogger(__name__)
_TRAINERS = {"sync": train_sync, "fully_async": train_fully_async}
NOT_REPEATABLE = "does not have a deterministic implementation"
"""Part of torch's error message for an operation without a deterministic implementation."""


async def launch(
    recipe: Recipe,
    *,
    progress: bool = True,
    next_command: str | None = None,
    rows: GivenRows | None = None,
    callbacks: Callbacks | None = None,
) -> RunOutcome:
    """Create a run directory and train. The caller has checked the recipe (`preflight`). `rows` are copied
    into the directory."""
    recipe = _dated(recipe)
    notes = share_gpus(recipe.run, recipe.trainer.mode, recipe.cluster, partial(seat_here, recipe))
    seat_here(recipe, gpu_names())  # raises on a machine that is too small, before anything is written
    data = await asyncio.to_thread(open_data, recipe.data, recipe.rollout, recipe.student, recipe.teachers)
    await _wait_for_servers(recipe, progress)
    run = RunDir.create(recipe.run.dir, recipe.run.name)
    if rows:
        recipe = recipe.model_copy(update={"data": rows.keep(recipe.data, run)})
    recipe, data = _settled(recipe, run).with_steps(len(data.train)), _with_notes(recipe, data, notes)
    run.write_recipe(recipe.model_dump())
    return await _train(recipe, data, run, progress, next_command, callbacks=callbacks)


async def resume(
    path: Path,
    overrides: Overrides = (),
    *,
    progress: bool = True,
    callbacks: Callbacks | None = None,
    tell: Callable[[str], object] = logger.info,
) -> RunOutcome:
    """Continue a run from its last checkpoint, or from the start if it has none.

    `overrides` change recipe keys that may change (`changed_recipe.py`); `tell` is called with each change.
    """
    run = RunDir.open(path)
    recipe, changes = changed_recipe(run, overrides)
    problems = preflight(recipe, progress=progress, new_run=False)
    if problems:
        raise ConfigError(problems)
    notes = share_gpus(recipe.run, recipe.trainer.mode, recipe.cluster, partial(seat_here, recipe))
    seat_here(recipe, gpu_names())
    data = await asyncio.to_thread(open_data, recipe.data, recipe.rollout, recipe.student, recipe.teachers)
    refuse_shorter(run, recipe.trainer, len(data.train))
    before, _ = changed_recipe(run, ())  # the recipe without this resume's overrides
    refuse_cut_window(run, before.trainer, recipe.trainer, len(data.train))
    recipe, data = recipe.with_steps(len(data.train)), _with_notes(recipe, data, notes)
    saved = last_checkpoint_step(run)
    finished = _is_finished(recipe, run, saved) and read_json(run.state).get("status") == "finished"
    if finished and await asyncio.to_thread(is_whole, run.checkpoints, saved):
        await asyncio.to_thread(_complete_files, run, saved)
        with LiveView(recipe.trainer.steps, enabled=progress) as view:
            view.note(
                f"nothing to do: {run.path} took all its {saved} steps already; trainer.steps=N goes on to step N"
            )
        return RunOutcome(run.path, saved, read_metrics(run.metrics))
    for change in changes:
        tell(f"changed {change}")
    await _wait_for_servers(recipe, progress)
    return await _train(recipe, data, run, progress, None, changes, callbacks)


async def _wait_for_servers(recipe: Recipe, progress: bool) -> None:
    """Before anything is loaded or written: a user may start the servers of teachers and engine together with the run."""
    servers = running_servers(recipe.teachers, recipe.rollout)
    view = LiveView(0, enabled=progress)
    await wait_for_servers(servers, recipe.cluster.start_timeout_seconds, view.note)


def _is_finished(recipe: Recipe, run: RunDir, steps: int) -> bool:
    """Whether all steps were taken, and the last one evaluated if the run has held-out problems."""
    evaluates = recipe.data.eval is not None and recipe.data.reward is not None
    return steps >= recipe.trainer.steps and not (evaluates and lacks_evaluation(run.metrics, steps))


def _complete_files(run: RunDir, step: int) -> None:
    """Repairs the files of a finished run whose launch was killed after its last step: half a line of metrics, no report."""
    with closing(run.lock()):
        forget_after(run, step)
        if not (run.path / REPORT).exists():
            write_report(run, _export_command(run))


def _export_command(run: RunDir) -> str:
    return f"understudy export {run.path} my-student"


def _with_notes(recipe: Recipe, data: PromptData, notes: Sequence[str]) -> PromptData:
    """The data with these notes, and one of how many steps `trainer.passes` are."""
    note = recipe.trainer.length_note(len(data.train))
    return replace(data, notes=[*notes, *data.notes, *([note] if note else [])])


def _dated(recipe: Recipe) -> Recipe:
    """The recipe with today as the day that chat templates see, so that a resume on another day renders the same
    prompts."""
    day = recipe.rollout.template_date or date.today().isoformat()
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"template_date": day})})


def _settled(recipe: Recipe, run: RunDir) -> Recipe:
    """The recipe with settings that depend on this machine made explicit, so that a resume on another machine
    repeats them."""
    threads = recipe.run.threads or os.cpu_count() or 1
    determinism = "full" if is_deterministic(recipe, len(gpu_names())) else "fast"
    settings = recipe.run.model_copy(
        update={"threads": threads, "determinism": determinism, "dir": str(run.path)}
    )
    return recipe.model_copy(update={"run": settings})


async def _train(
    recipe: Recipe,
    data: PromptData,
    run: RunDir,
    progress: bool,
    next_command: str | None,
    changes: Sequence[Change] = (),
    callbacks: Callbacks | None = None,
) -> RunOutcome:
    require_extras(recipe)
    lock = run.lock()
    if changes:
        run.write_recipe(recipe.model_dump())
        logger.info("resumed with changes: %s", "; ".join(map(str, changes)))
    handler = log_to(run.logs / "trainer.log")
    outcome, detail, steps = "failed", "", 0
    facts: dict[str, object] = {"objective": describe(recipe.loss).name}
    try:
        with (
            own_ray_cluster(recipe.cluster),
            LiveView(recipe.trainer.steps, enabled=progress) as view,
            Interrupts(view.note) as stop,
        ):
            _write_state(run, "running", "", facts)
            capacity = capacity_notes(recipe.trainer, recipe.rollout, recipe.dataplane)
            for note in capacity:
                logger.warning(note)
            for note in (*data.notes, *capacity):
                view.note(note)
            steps = await with_restarts(
                lambda: _attempt(recipe, data, run, view, stop, facts, callbacks),
                recipe.cluster.restarts.student,
                partial(last_checkpoint_step, run),
                stop,
                view.note,
            )
        outcome = "finished" if _is_finished(recipe, run, steps) else "stopped"
    except asyncio.CancelledError:
        outcome, detail = "stopped", "interrupted while starting"
        raise KeyboardInterrupt from None
    except BaseException as error:
        detail = f"{type(error).__name__}: {error}"
        logger.exception("the run failed")
        raise
    finally:
        try:
            _write_state(run, outcome, detail, facts)
        except RunDirectoryError:
            if outcome != "failed":  # otherwise the run's own error is raised
                raise
        logging.getLogger("understudy").removeHandler(handler)
        handler.close()
        lock.close()
    if read_metrics(run.metrics):
        try:
            await asyncio.to_thread(write_report, run, next_command or _export_command(run))
        except OSError as error:
            raise _of_disk(error, run) from error
    return RunOutcome(run.path, steps, read_metrics(run.metrics))


async def _attempt(
    recipe: Recipe,
    data: PromptData,
    run: RunDir,
    view: LiveView,
    stop: Interrupts,
    facts: dict[str, object],
    callbacks: Callbacks | None = None,
) -> int:
    """Trains from the last checkpoint to the recipe's last step or a stop request. Returns the last step
    taken."""
    processes = processes_of(recipe.cluster, run, partial(ray_layout, recipe), cpus_of_own_ray(recipe))
    stop.starting(processes.kill_now)
    try:
        view.phase(f"run directory {run.path}")
        checkpoint = last_checkpoint(run, recipe.trainer.keep_checkpoints)
        if checkpoint and checkpoint.skipped:
            view.note(f"{'; '.join(checkpoint.skipped)}; going back to step {checkpoint.step}")
        forget_after(run, checkpoint.step if checkpoint else None)
        write_stopped = partial(_write_state, run, "stopped", "", facts)
        calls = CallbackRunner(callbacks, stop, run.path, recipe.trainer.steps) if callbacks else None
        async with build(recipe, run, processes, view, data, calls) as system:
            for part in (system.learner.policy, system.learner.critic):
                if isinstance(part, LeadingPolicy | RemoteCritic):
                    # If ranks or critic are given up, nothing more can be saved, so the process may end.
                    give_up = partial(stop.start_exit_timer, write_stopped)
                    stop.on_stop(partial(part.stop_soon, STOP_WAIT_S, give_up))
            await system.state.plane.rewind(
                checkpoint.step if checkpoint else 0, keep_rows=not system.learner.settings.deterministic
            )
            system.state.tally.dead_letters = count_letters(run.dead_letters, PARTITION)
            if checkpoint:
                await restore(system, checkpoint)
                await system.learner.publish(checkpoint.step)
                verify_followers(checkpoint.extra["teachers"], system.producer.teachers.manifests())
                view.note(f"continuing after step {checkpoint.step}")
            stop.training = True
            async with watched(
                system.state.spans,
                run.waits,
                recipe.trainer.stall_seconds,
                view.note,
                partial(vitals, system),
                partial(waits, system),
            ):
                steps = await _TRAINERS[recipe.trainer.mode](system, stop)
            await finish_saving(system.state)
            if stop.requested:
                stop.start_exit_timer(write_stopped)
            facts |= {
                "rows_trained": system.state.tally.rows_trained,
                "dead_letters": system.state.tally.dead_letters,
            }
        return steps
    except UnderstudyError:
        raise
    except (BaseExceptionGroup, Exception) as error:
        cause = _of_disk(explained(_first_cause(error), recipe), run)
        if cause is error:
            raise
        raise cause from cause.__cause__
    finally:
        await processes.close()


def _write_state(run: RunDir, status: str, detail: str, facts: dict[str, object]) -> None:
    state = {"status": status, "detail": detail, "pid": os.getpid(), "host": socket.gethostname(), **facts}
    write_atomically(run.state, json.dumps(redact(state), indent=1) + "\n")


def _first_cause(error: BaseException) -> BaseException:
    """The cause in a task group's errors: a lost rank if there is one, otherwise the first `UnderstudyError`.
    Later errors follow from it."""
    while isinstance(error, BaseExceptionGroup):
        lost = error.subgroup(RankLost)
        error = lost or error
        ours = [inner for inner in error.exceptions if isinstance(inner, UnderstudyError)]
        error = ours[0] if ours else error.exceptions[0]
    return error


def explained(error: BaseException, recipe: Recipe) -> BaseException:
    """The error, or for known causes an error that names the recipe keys to change."""
    if is_full_memory(error):
        return _full_memory(error, recipe)
    if lacks_memory(error):
        return _no_host_memory(recipe)
    if isinstance(error, RuntimeError) and NOT_REPEATABLE in str(error):
        return _not_repeatable(error)
    return error


def _of_disk(error: BaseException, run: RunDir) -> BaseException:
    """The error, or for a full or failing disk one that names the file and says what to do."""
    failure = None if isinstance(error, UnderstudyError) else disk_failure(error)
    if failure is None:
        return error
    return cannot_be_written(Path(failure.filename) if failure.filename else run.path, failure)


def _not_repeatable(error: RuntimeError) -> PolicyError:
    # "cumsum_cuda_kernel does not have a deterministic implementation, but you set …"
    operation = str(error).split(NOT_REPEATABLE)[0].strip()
    return PolicyError(
        f"run.determinism = 'full': torch's {operation} cannot repeat its sums to the bit on a GPU. "
        "run.determinism = 'fast' allows it; or leave out what needs it (of a loss or model of your own, say)"
    )


def _full_memory(error: BaseException, recipe: Recipe) -> PolicyError:
    # torch's allocator: "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of …"; the
    # text after that is about the allocator. The driver: "CUDA error: out of memory" and general advice.
    if isinstance(error, torch.OutOfMemoryError):
        sentences = " ".join(str(error).split()).replace("GPU 0 has", "The GPU has").split(". ")
        cause = ". ".join(sentences[1:3])
    else:
        cause = "the driver has none left; `nvidia-smi` lists the processes that hold it"
    student = recipe.student
    ways = [
        f"trainer.micro_batch_tokens (now {recipe.trainer.micro_batch_tokens}) decides what a forward and backward keeps, and "
        "changes no result: halve it first",
        f"rollout.max_batch (now {recipe.rollout.max_batch}) and rollout.context_length decide what the engine keeps for its "
        "rows",
    ]
    if not student.gradient_checkpointing:
        ways.append(
            "student.gradient_checkpointing = true computes activations twice instead of keeping them"
        )
    return PolicyError(f"the GPU's memory is full: {cause}.\n" + "\n".join(f"- {way}" for way in ways))


def _no_host_memory(recipe: Recipe) -> PolicyError:
    return PolicyError(
        "the trainer is out of memory on this machine; what was saved before is intact, and `understudy resume` continues.\n"
        f"- trainer.micro_batch_tokens (now {recipe.trainer.micro_batch_tokens}) and rollout.max_batch "
        f"(now {recipe.rollout.max_batch}) decide what a step holds\n"
        "- fewer teachers.NAME.replicas and rollout.workers leave more of the machine's memory"
    )
