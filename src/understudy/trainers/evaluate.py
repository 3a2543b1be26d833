"""Held-out accuracy: greedy answers to problems nothing was trained on, judged by the recipe's reward."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from understudy.config import parse_recipe
from understudy.engines.base import Engine, GenerateRequest, Generation, Sampling
from understudy.errors import ConfigError
from understudy.observability.rundir import RunDir, read_json
from understudy.policy.checkpoint import CheckpointStore
from understudy.rollout.agent import LoopContext
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.loops import LoopChoice
from understudy.rollout.render import Renderer
from understudy.rollout.rewards import Rewards, load_reward
from understudy.trainers.gather import Cohort, Lane
from understudy.trainers.loading import copy_weights, load_model
from understudy.trainers.system import System
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

_KEPT_SAMPLES = 8
"""Rollouts per data source that go to samples.jsonl at each evaluation."""
_MAX_BATCH = 64


async def evaluate(system: System, step: int, teachers: bool = False) -> dict[str, float]:
    """Accuracy of the student now, per data source; with `teachers`, once, that of each teacher on its own rows."""
    if not system.eval_prompts or not system.recipe.data.reward:
        return {}
    system.view.phase(f"evaluating on {len(system.eval_prompts)} held-out problems")
    with system.spans.span("evaluate", step=step):
        answers = await answer(
            system.eval_prompts, system.engine, system.loops, system.rewards, system.renderer, system.sampling,
            system.policy.context_length, system.recipe.rollout.max_batch,
        )  # fmt: skip
    _keep(system, step, answers)
    metrics = {
        f"val/accuracy{name}": value for name, value in _accuracy(system.eval_prompts, answers).items()
    }
    if teachers and system.recipe.trainer.eval_teachers:
        metrics |= await _teacher_accuracy(system)
    system.view.phase("")
    return metrics


async def answer(
    prompts: Sequence[Prompt],
    engine: Engine,
    loops: LoopChoice,
    rewards: Rewards,
    renderer: Renderer,
    sampling: Sampling,
    context: int,
    max_batch: int,
) -> list[Trajectory]:
    """Greedy answers in the order of the prompts; batches are composed by key, so they repeat to the bit."""
    greedy = replace(sampling, temperature=0.0)
    lane = Lane("generate", engine.generate, max_batch)

    async def one(prompt: Prompt, cohort: Cohort) -> Trajectory:
        async def generate(tokens: np.ndarray, wanted: Sampling, turn: int) -> Generation:
            key = f"{prompt.key}/{turn}"
            result: Generation = await cohort.call(lane, key, GenerateRequest(key, tokens, wanted, seed=0))
            return result

        async with cohort.member():
            trajectories = await loops.of(prompt).run(
                prompt, LoopContext(generate, renderer, greedy, prompt.key, 0, context)
            )
            return await rewards.judge(prompt, trajectories[-1])

    answers: list[Trajectory] = []
    for start in range(0, len(prompts), max_batch):
        chunk = prompts[start : start + max_batch]
        cohort = Cohort(len(chunk))
        answers += await asyncio.gather(*(one(prompt, cohort) for prompt in chunk))
    return answers


async def evaluate_model(
    model: str, data: Path | None, reward: str | None, max_new_tokens: int | None, samples: int | None
) -> dict[str, float]:
    """`understudy eval`: a run's latest student, or any model, on any data."""
    folder, recipe = Path(model), None
    if (folder / "recipe.json").is_file():
        run = RunDir.open(folder)
        recipe = parse_recipe(read_json(run.recipe))
    source = str(data) if data else recipe.data.eval if recipe else None
    judge = reward or (recipe.data.reward if recipe else None)
    if source is None or judge is None:
        raise ConfigError("nothing to measure with: give --data FILE and --reward module:function")
    student = load_model(recipe.student.model if recipe else model)
    if recipe:
        store = CheckpointStore(RunDir.open(folder).checkpoints, recipe.trainer.keep_checkpoints)
        copy_weights(student.model, store.load().policy.model)
    budget = max_new_tokens or (recipe.rollout.max_new_tokens if recipe else 256)
    max_batch = recipe.rollout.max_batch if recipe else _MAX_BATCH
    engine = student.engine(max_batch)
    renderer = Renderer(student.tokenizer, context=student.context, reserve=budget)
    prompts = eval_prompts(load_dataset(source), samples)
    try:
        answers = await answer(
            prompts, engine, LoopChoice(recipe.rollout.agent if recipe else "single_turn"), Rewards([load_reward(judge)], renderer),
            renderer, Sampling(max_new_tokens=budget, stop_ids=student.stop_ids), student.context, max_batch,
        )  # fmt: skip
    finally:
        await engine.close()
    return {f"accuracy{name}": value for name, value in _accuracy(prompts, answers).items()}


def eval_prompts(dataset: Dataset, samples: int | None) -> list[Prompt]:
    """The held-out problems in file order, the first `samples` of them; no shuffling, so every run has the same ones."""
    count = len(dataset) if samples is None else min(samples, len(dataset))
    return [dataset.prompt(i, key=f"eval-{i:07d}", epoch=0) for i in range(count)]


def _accuracy(prompts: Sequence[Prompt], answers: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward over all problems (name "") and per data source (name "/source")."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for prompt, trajectory in zip(prompts, answers, strict=True):
        by_source[prompt.data_source or "all"].append(float(trajectory.reward or 0.0))
    every = [reward for rewards in by_source.values() for reward in rewards]
    return {
        "": float(np.mean(every)),
        **{f"/{source}": float(np.mean(by_source[source])) for source in sorted(by_source)},
    }


async def _teacher_accuracy(system: System) -> dict[str, float]:
    """Each teacher answers the problems it would judge: the mark the student is measured against."""
    assert system.router is not None
    metrics: dict[str, float] = {}
    for name, teacher in system.recipe.teachers.items():
        mine = [prompt for prompt in system.eval_prompts if system.router.route(prompt.data_source) == name]
        if not mine or teacher.placement == "external":
            continue
        system.view.phase(f"evaluating teacher {name} on {len(mine)} held-out problems")
        loaded = await asyncio.to_thread(
            load_model, teacher.model, dtype=teacher.dtype, device=teacher.device
        )
        engine = loaded.engine(system.recipe.rollout.max_batch)
        try:
            answers = await answer(
                mine, engine, system.loops, system.rewards, system.renderer, system.sampling, loaded.context,
                system.recipe.rollout.max_batch,
            )  # fmt: skip
        finally:
            await engine.close()
        metrics |= {
            f"val/teacher_accuracy{key}": value for key, value in _accuracy(mine, answers).items() if key
        }
    return metrics


def _keep(system: System, step: int, answers: Sequence[Trajectory]) -> None:
    """A few rollouts of each evaluation, always the same problems, for the report."""
    kept: dict[str, int] = defaultdict(int)
    with system.run.samples.open("a") as handle:
        for prompt, trajectory in zip(system.eval_prompts, answers, strict=True):
            if kept[prompt.data_source] >= _KEPT_SAMPLES:
                continue
            kept[prompt.data_source] += 1
            written = trajectory.tokens[trajectory.loss_mask]
            line = {
                "step": step,
                "key": prompt.key,
                "source": prompt.data_source,
                "prompt": prompt.text if prompt.text is not None else prompt.messages[-1]["content"],
                "text": system.renderer.decode(written),
                "answer": prompt.columns.get("answer"),
                "reward": trajectory.reward,
                "stop_reason": str(trajectory.stop_reason),
            }
            handle.write(json.dumps(line) + "\n")
