"""Builds a running `System` from a recipe. Other modules get plain arguments instead of the recipe."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import torch

from understudy.assembly.agent_loops import Keeping, open_loops
from understudy.assembly.backends import open_plane
from understudy.assembly.cpu_threads import collecting_seldom, lanes_of, products_of_lanes, torch_threads
from understudy.assembly.critic import ComingCritic, critic_of, reference_of
from understudy.assembly.engines import context_of, open_engine, publisher_of, sampling_of
from understudy.assembly.prompt_facts import LongestPrompt, mixed_teachers
from understudy.assembly.ranks import start_ranks
from understudy.assembly.teacher_admin import open_for_requests
from understudy.assembly.teachers import (
    StudentFacts,
    manifests_of,
    router_of,
    start_teachers,
    teacher_lanes,
    teacher_tokens,
)
from understudy.assembly.this_machine import gpu_names, seat_here
from understudy.assembly.usable_ids import find_usable_ids, keep_usable_ids
from understudy.cluster.local import LocalProcesses
from understudy.config import Recipe
from understudy.config.base import flatten
from understudy.config.checks.fully_async import repeats_to_the_bit
from understudy.engines.base import Engine
from understudy.losses.objective import Objective
from understudy.nn.determinism import keep_to_repeatable
from understudy.observability.live import LiveView
from understudy.observability.loggers import ToldMetrics
from understudy.observability.metrics import read_metrics
from understudy.observability.redact import redact
from understudy.observability.rundir import RunDir
from understudy.observability.spans import Spans
from understudy.planning.seating import critic_sits_apart, with_rollout_devices
from understudy.planning.shared_gpu import advice
from understudy.policy.checkpoints.background import BackgroundSaver
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.lora import LoraSettings
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule, ScheduleKind
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.policy.step import PolicySettings
from understudy.rollout.agents.registry import Loops
from understudy.rollout.cursor import PromptCursor
from understudy.rollout.dataset import Dataset
from understudy.rollout.loading import look_in
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards, load_reward
from understudy.rollout.workers.pool import LoopWorkers
from understudy.teacher.scoring.model import vocabulary_of
from understudy.trainers.call_batching import Lane
from understudy.trainers.critic.local import ValueModel
from understudy.trainers.critic.remote import FarCritic
from understudy.trainers.evaluation.best_checkpoint import BestSoFar
from understudy.trainers.evaluation.evaluate import eval_prompts
from understudy.trainers.learn.refused_steps import keep_refused
from understudy.trainers.models import LoadedModel, load_model, resolve_device
from understudy.trainers.prompt_data import PromptData, open_data
from understudy.trainers.remote_rows.batches import open_far_rows
from understudy.trainers.remote_rows.rollouts import MODULE as ROW_WORKER
from understudy.trainers.remote_rows.rollouts import RowWorkers, brings_tokens, settings_of, writes_rows
from understudy.trainers.remote_rows.scoring import FarScoring
from understudy.trainers.system import PARTITION, System
from understudy.types.usable_ids import UsableIds
from understudy.weights.publish import WeightPublisher


@asynccontextmanager
async def build(
    recipe: Recipe, run: RunDir, processes: LocalProcesses, view: LiveView, data: PromptData | None = None
) -> AsyncIterator[System]:
    """Start everything a run needs. All of it is stopped again at the end, also after an error.

    `data`: the prompts, if they were read already."""
    async with AsyncExitStack() as stack:
        look_in(recipe.run.python_path)
        deterministic = is_deterministic(recipe)
        steady_torch(recipe)
        stack.enter_context(products_of_lanes(recipe))
        if resolve_device(recipe.student.device).type == "cpu":
            stack.enter_context(collecting_seldom())
        if recipe.cluster.backend != "local":
            view.phase(f"connecting to {recipe.cluster.backend}")
        await processes.ready()
        seating = seat_here(recipe)
        for words in (seating.shared(), advice(seating.placement)):
            if words:
                view.note(words)
        recipe = with_rollout_devices(recipe, seating, gpu_names())
        coming = None
        if critic_sits_apart(recipe):
            coming = ComingCritic(recipe, run, processes, seating, gpu_names(), stack)
        with view.work(f"loading the student {recipe.student.model}"):
            student = await asyncio.to_thread(load_student_of, recipe)
        usable = await find_usable_ids(recipe, student, teacher_tokens(recipe), view.note)
        keep_usable_ids(run, usable)
        rows = data if data is not None else await asyncio.to_thread(open_data, recipe)
        prompts = rows.train
        far_scoring = FarScoring() if writes_rows(recipe, processes) else None
        teachers = await start_teachers(
            recipe,
            processes,
            seating,
            _student_facts(recipe, student, prompts, usable),
            view,
            secrets.token_urlsafe(24),
            deterministic,
            far_scoring,
        )
        stack.push_async_callback(teachers.close)
        await stack.enter_async_context(open_for_requests(run, teachers))
        pools = teachers.pools

        policy, engine, publisher = await _policy_and_engine(
            recipe, run, processes, student, usable, stack, view
        )
        await publisher.publish(0)
        critic = await _critic(recipe, run, coming, view)
        reference = await asyncio.to_thread(reference_of, recipe, usable)

        plane = await open_plane(recipe, run, deterministic, stack)
        far_rows = None
        if isinstance(policy, LeadingPolicy) and recipe.dataplane.backend == "transfer_queue":
            far_rows = await open_far_rows(
                plane, policy, recipe.dataplane.queue_timeout_seconds, stack.callback
            )
        renderer = _renderer(recipe, student)
        loops, row_workers = await _loops(
            recipe, run, renderer, processes, plane, stack, far_scoring, engine, view.note
        )
        rewards = Rewards([load_reward(recipe.data.reward)] if recipe.data.reward else [], renderer)
        stack.push_async_callback(rewards.close)
        metrics = ToldMetrics(
            run.metrics,
            recipe.run.loggers,
            run.path / "loggers",
            run.path.name,
            flatten(redact(recipe.model_dump())),
            view.note,
        )
        stack.callback(metrics.close)
        spans = Spans(run.spans)
        stack.callback(spans.close)
        checkpoints = _checkpoints(recipe, run)
        saver = BackgroundSaver(checkpoints)
        stack.push_async_callback(asyncio.to_thread, saver.close)
        background = await stack.enter_async_context(asyncio.TaskGroup())
        if isinstance(policy, LeadingPolicy):
            stack.callback(policy.expect_the_end)
        if isinstance(critic, FarCritic):
            stack.callback(critic.expect_the_end)
        yield System(
            recipe=recipe,
            run=run,
            tokenizer=student.tokenizer,
            renderer=renderer,
            sampling=sampling_of(recipe, student, usable),
            engine=engine,
            engine_lane=Lane("generate", engine.generate, recipe.rollout.max_batch),
            policy=policy,
            objective=objective_of(recipe),
            publisher=publisher,
            pools=pools,
            router=router_of(recipe, pools),
            teacher_lanes=teacher_lanes(pools, deterministic),
            teacher_heads=teachers.heads,
            plane=plane,
            cursor=PromptCursor(prompts, recipe.run.seed, recipe.data.shuffle),
            loops=loops,
            rewards=rewards,
            checkpoints=checkpoints,
            eval_prompts=eval_prompts(rows.eval, recipe.trainer.eval_samples) if rows.eval else [],
            metrics=metrics,
            spans=spans,
            view=view,
            deterministic=deterministic,
            manifests=manifests_of(pools),
            saver=saver,
            background=background,
            best=BestSoFar(read_metrics(run.metrics)),
            critic=critic,
            reference=reference,
            far_rows=far_rows,
            row_workers=row_workers,
            far_scoring=far_scoring,
        )


async def _critic(
    recipe: Recipe, run: RunDir, coming: ComingCritic | None, view: LiveView
) -> ValueModel | None:
    """The critic in its own process (`coming`), or in this process; None if the recipe has none."""
    on_bad_rows = partial(keep_refused, run, "critic")
    if coming is not None:
        return await coming.arrived(on_bad_rows, view)
    return await asyncio.to_thread(critic_of, recipe, on_bad_rows)


async def _loops(
    recipe: Recipe,
    run: RunDir,
    renderer: Renderer,
    processes: LocalProcesses,
    plane: Any,
    stack: AsyncExitStack,
    far_scoring: FarScoring | None,
    engine: Engine,
    notify: Callable[[str], None],
) -> tuple[Loops, RowWorkers | None]:
    """The agent loops, and the same workers as `RowWorkers` if they write rows themselves."""
    keeping = None
    if far_scoring is not None:
        keeping = Keeping(ROW_WORKER, plane.lent, settings_of(recipe, run, plane, PARTITION))
    loops = await open_loops(recipe, renderer, run.path / "tokenizer", processes, stack, keeping, notify)
    if far_scoring is None:
        return loops, None
    assert isinstance(loops, LoopWorkers)
    row_workers = RowWorkers(loops, plane, PARTITION, bring_tokens=brings_tokens(recipe, engine))
    far_scoring.open(row_workers)
    return loops, row_workers


async def _policy_and_engine(
    recipe: Recipe,
    run: RunDir,
    processes: LocalProcesses,
    student: LoadedModel,
    usable: UsableIds | None,
    stack: AsyncExitStack,
    view: LiveView,
) -> tuple[Policy | LeadingPolicy, Engine, WeightPublisher]:
    """In sync mode on one rank, engine and policy share their tensors.

    The engine has its own copy if the policy is sharded (shards are gathered into it), has adapters (merged
    into it), or trains while rollouts continue."""
    settings, on_bad_rows = policy_settings(recipe, usable), partial(keep_refused, run, "student")
    shared = recipe.trainer.ranks == 1 and recipe.trainer.mode == "sync" and recipe.student.lora is None
    engine = await open_engine(
        recipe, student, processes, view, shared=shared, deterministic=is_deterministic(recipe)
    )
    stack.push_async_callback(engine.close)
    policy: Policy | LeadingPolicy
    if recipe.trainer.ranks == 1:
        policy = Policy(student.model, settings, on_bad_rows=on_bad_rows)
    else:
        policy = await start_ranks(recipe, run, processes, student, settings, on_bad_rows, stack, view)
    return policy, engine, publisher_of(recipe, policy, engine, shared=shared)


def _renderer(recipe: Recipe, student: LoadedModel) -> Renderer:
    return Renderer(
        student.tokenizer,
        context=context_of(recipe, student),
        reserve=recipe.rollout.max_new_tokens,
        template_options=recipe.rollout.template_options,
        max_prompt=recipe.data.max_prompt_tokens,
        truncate=recipe.data.overlong == "truncate_left",
    )


def _student_facts(
    recipe: Recipe, student: LoadedModel, prompts: Dataset, usable: UsableIds | None
) -> StudentFacts:
    return StudentFacts(
        vocabulary_of(recipe.student.model, recipe.student.revision),
        student.model.get_output_embeddings().weight.shape[0],
        usable,
        student.device,
        context_of(recipe, student),
        LongestPrompt(_renderer(recipe, student), prompts),
        mixed_teachers(prompts, recipe.data.mixture_key),
    )


def _checkpoints(recipe: Recipe, run: RunDir) -> CheckpointStore:
    """The run's checkpoint store. It first removes half-written checkpoints of a crash, which is safe under
    the run's lock."""
    store = CheckpointStore(run.checkpoints, recipe.trainer.keep_checkpoints)
    store.recover()
    return store


def is_deterministic(recipe: Recipe) -> bool:
    if recipe.run.determinism is not None:
        return recipe.run.determinism == "full"
    if not repeats_to_the_bit(recipe.trainer) or recipe.rollout.engine != "hf":
        return False
    return recipe.student.device == "cpu" or (
        recipe.student.device == "auto" and not torch.cuda.is_available()
    )


def objective_of(recipe: Recipe) -> Objective:
    loss = recipe.loss
    return Objective(
        kind=loss.kind,
        signal=loss.signal,
        tail=loss.tail,
        beta=loss.beta,
        alpha=loss.alpha,
        mixture_weight=loss.mixture_weight,
        policy_gradient=loss.policy_gradient,
        distill_coef=loss.distill_coef,
        task_coef=loss.task_coef,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        tis_cap=loss.tis_cap,
        discount=loss.discount,
        per_token_clamp=loss.per_token_clamp,
        loss_max_clamp=loss.loss_max_clamp,
        log_prob_min_clamp=loss.log_prob_min_clamp,
        clamp_at_zero=loss.clamp_at_zero,
        kl_coef=loss.kl_coef if loss.kl_in == "loss" else 0.0,
        kl_kind=loss.kl_kind,
        backend=loss.backend,
    )


def load_student_of(recipe: Recipe) -> LoadedModel:
    student = recipe.student
    return load_model(
        student.model,
        dtype=student.dtype,
        device=student.device,
        trust_remote_code=student.trust_remote_code,
        revision=student.revision,
        attention=student.attention,
    )


def policy_settings(recipe: Recipe, usable: UsableIds | None = None) -> PolicySettings:
    trainer = recipe.trainer
    return PolicySettings(
        schedule=Schedule(
            ScheduleKind(trainer.schedule), trainer.learning_rate, trainer.steps, trainer.warmup_steps
        ),
        adamw=AdamWSettings(
            weight_decay=trainer.weight_decay,
            grad_clip=trainer.grad_clip,
            offload=trainer.offload_optimizer,
            kind=trainer.optimizer,
        ),
        gradient_checkpointing=recipe.student.gradient_checkpointing,
        compile=recipe.student.compile,
        loss_temperature=recipe.loss.student_temperature,
        lanes=lanes_of(recipe),
        lora=lora_settings(recipe),
        usable=usable,
        ema_decay=trainer.ema_decay,
    )


def lora_settings(recipe: Recipe) -> LoraSettings | None:
    """Adapters are initialised from the run's seed, so every rank and every resume starts from the same
    values."""
    lora = recipe.student.lora
    if lora is None:
        return None
    return LoraSettings(lora.rank, lora.alpha, tuple(lora.targets), seed=recipe.run.seed)


def steady_torch(recipe: Recipe, share_of: int = 1) -> None:
    """Sets torch's thread count, seed and determinism.

    Sums depend on how they are split over threads, so a deterministic run fixes the thread count. A rank gets
    one `share_of`-th of the threads, because all ranks compute at the same time."""
    if (threads := torch_threads(recipe)) is not None:
        torch.set_num_threads(max(threads // share_of, 1))
    torch.manual_seed(recipe.run.seed)
    keep_to_repeatable(is_deterministic(recipe), resolve_device(recipe.student.device))
