"""The one place where a recipe becomes a running system. Everyone else gets plain arguments."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from understudy.cluster.local import LocalProcesses
from understudy.config import Recipe
from understudy.dataplane.base import Retain
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.engines.base import Sampling
from understudy.losses.objective import Objective
from understudy.observability.live import LiveView
from understudy.observability.metrics import MetricsWriter
from understudy.observability.rundir import RunDir
from understudy.observability.spans import Spans
from understudy.policy.checkpoint import CheckpointStore
from understudy.policy.optimizer import AdamWSettings
from understudy.policy.policy import Policy, PolicySettings
from understudy.policy.schedule import Schedule, ScheduleKind
from understudy.rollout.cursor import PromptCursor
from understudy.rollout.dataset import load_dataset
from understudy.rollout.loops import LoopChoice
from understudy.rollout.render import Renderer
from understudy.rollout.rewards import Rewards, load_reward
from understudy.teacher.vocabulary import SPECIAL, Vocabulary
from understudy.trainers.evaluate import eval_prompts
from understudy.trainers.gather import Lane
from understudy.trainers.loading import LoadedModel, load_model
from understudy.trainers.system import System
from understudy.trainers.teachers import manifests_of, router_of, start_teachers, teacher_lanes
from understudy.types.batch import Batch
from understudy.weights.in_process import SharedWeights


@asynccontextmanager
async def build(
    recipe: Recipe, run: RunDir, processes: LocalProcesses, view: LiveView
) -> AsyncIterator[System]:
    """Start everything a run needs; whatever happens, everything started is stopped again."""
    async with AsyncExitStack() as stack:
        deterministic = is_deterministic(recipe)
        _steady_torch(recipe, deterministic)
        view.phase(f"loading the student {recipe.student.model}")
        student = await asyncio.to_thread(_load_student, recipe)
        vocabulary = vocabulary_of(student.tokenizer)
        teachers = await start_teachers(
            recipe, processes, vocabulary, view, secrets.token_urlsafe(24), deterministic
        )
        stack.push_async_callback(teachers.close)
        pools = teachers.pools

        policy = Policy(student.model, _policy_settings(recipe), on_bad_rows=partial(keep_refused, run))
        engine = student.engine(recipe.rollout.max_batch)
        stack.push_async_callback(engine.close)
        publisher = SharedWeights(policy.model, engine)
        await publisher.publish(0)

        plane = EmbeddedDataPlane.open(
            run.dataplane,
            max_rows=recipe.dataplane.max_rows,
            max_bytes=recipe.dataplane.max_bytes,
            spill_bytes=recipe.dataplane.spill_bytes,
            retain=Retain.UNTIL_ACK if deterministic else Retain.UNTIL_SETTLED,
        )
        stack.push_async_callback(plane.close)
        renderer = Renderer(student.tokenizer, context=student.context, reserve=recipe.rollout.max_new_tokens)
        loops = LoopChoice(recipe.rollout.agent)
        stack.push_async_callback(loops.close)
        rewards = Rewards([load_reward(recipe.data.reward)] if recipe.data.reward else [], renderer)
        stack.push_async_callback(rewards.close)
        metrics = MetricsWriter(run.metrics)
        stack.callback(metrics.close)
        spans = Spans(run.spans)
        stack.callback(spans.close)
        yield System(
            recipe=recipe,
            run=run,
            tokenizer=student.tokenizer,
            renderer=renderer,
            sampling=_sampling(recipe, student),
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
            cursor=PromptCursor(load_dataset(recipe.data.train), recipe.run.seed, recipe.data.shuffle),
            loops=loops,
            rewards=rewards,
            checkpoints=_checkpoints(recipe, run),
            eval_prompts=eval_prompts(load_dataset(recipe.data.eval), recipe.trainer.eval_samples)
            if recipe.data.eval
            else [],
            metrics=metrics,
            spans=spans,
            view=view,
            deterministic=deterministic,
            manifests=manifests_of(pools),
        )


def keep_refused(run: RunDir, rows: Batch, reason: str) -> None:
    """Rows whose loss or gradient was not finite, kept as they were, so that the step can be looked into."""
    with run.refused.open("a") as handle:
        for index, key in enumerate(rows.keys):
            line = {
                "key": key,
                "reason": reason,
                "tokens": rows.tokens[index].tolist(),
                "loss_mask": rows.loss_mask[index].tolist(),
            }
            if rows.teacher_logprobs is not None:
                line["teacher_logprobs"] = rows.teacher_logprobs[index].tolist()
            handle.write(json.dumps(line) + "\n")


def _checkpoints(recipe: Recipe, run: RunDir) -> CheckpointStore:
    """The run's own store; what a crash left half-written is cleared first (the run's lock is held)."""
    store = CheckpointStore(run.checkpoints, recipe.trainer.keep_checkpoints)
    store.recover()
    return store


def is_deterministic(recipe: Recipe) -> bool:
    if recipe.run.determinism is not None:
        return recipe.run.determinism == "full"
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
        backend=loss.backend,
    )


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    return Vocabulary(tokenizer.get_vocab(), {role: getattr(tokenizer, f"{role}_id") for role in SPECIAL})


def _load_student(recipe: Recipe) -> LoadedModel:
    student = recipe.student
    return load_model(
        student.model,
        dtype=student.dtype,
        device=student.device,
        trust_remote_code=student.trust_remote_code,
        revision=student.revision,
    )


def _policy_settings(recipe: Recipe) -> PolicySettings:
    trainer = recipe.trainer
    return PolicySettings(
        schedule=Schedule(
            ScheduleKind(trainer.schedule), trainer.learning_rate, trainer.steps, trainer.warmup_steps
        ),
        adamw=AdamWSettings(weight_decay=trainer.weight_decay, grad_clip=trainer.grad_clip),
        gradient_checkpointing=recipe.student.gradient_checkpointing,
        loss_temperature=recipe.loss.student_temperature,
    )


def _sampling(recipe: Recipe, student: LoadedModel) -> Sampling:
    rollout = recipe.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        stop_ids=student.stop_ids,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )


def _steady_torch(recipe: Recipe, deterministic: bool) -> None:
    """Sums depend on how they are split over threads, so the thread count is part of a deterministic run."""
    if recipe.run.threads is not None:
        torch.set_num_threads(recipe.run.threads)
    torch.manual_seed(recipe.run.seed)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
