"""Held-out accuracy: answers to problems nothing was trained on, judged by the recipe's reward.

`val/accuracy` is of greedy answers. With `trainer.eval_k` each problem is also sampled k times at the rollout's own
temperature: `val/avg@k`, `val/pass@1` … `val/pass@k`. All names come once over everything and once per data source. Seeds
belong to the problem, not to the step, so two evaluations differ by the weights alone.

Answers that cannot be had or judged count as unsolved: `val/failed` says how many, and each is a dead letter with its reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from understudy.config import Recipe, parse_recipe
from understudy.config.rollout import RolloutConfig
from understudy.config.trainer import TrainerConfig
from understudy.engines.base import Sampling
from understudy.errors import ConfigError
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.loading import look_in
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards, load_reward
from understudy.trainers.evaluation.accuracy import mean_by_source, sampled_measures
from understudy.trainers.evaluation.best_checkpoint import best_step
from understudy.trainers.evaluation.examiner import Examiner, Failure
from understudy.trainers.models import LoadedModel, load_model, put_student
from understudy.trainers.produce.produce import routing_value
from understudy.trainers.prompt_data import without_overlong
from understudy.trainers.system import System
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory

logger = logging.getLogger(__name__)

_KEPT_SAMPLES = 8
"""Rollouts per data source that go to samples.jsonl at each evaluation."""
_MAX_BATCH = 64
_SHOWN = 3
_EVAL = "eval"
"""The partition of the ledger that holds answers which failed."""


async def evaluate(system: System, step: int, teachers: bool = False) -> dict[str, float]:
    """Accuracy of the student now, per data source; with `teachers`, once, that of each teacher on its own rows."""
    if not system.eval_prompts or not system.recipe.data.reward:
        return {}
    trainer, prompts = system.recipe.trainer, system.eval_prompts
    examiner = Examiner(
        system.engine, system.loops, system.rewards, system.renderer, system.sampling,
        system.renderer.context, system.recipe.rollout.max_batch, system.recipe.run.seed,
    )  # fmt: skip
    text = f"evaluating on {len(prompts)} held-out problems"
    with (
        system.spans.span("evaluate", step=step),
        system.view.work(text, total=len(prompts) * (1 + trainer.eval_k)) as advance,
    ):
        answers = await examiner.greedy(prompts, advance)
        judged = await examiner.sampled(prompts, trainer.eval_k, advance) if trainer.eval_k else []
    _keep(system, step, answers)
    await _bury(system, step, examiner.failures, "")
    metrics = {
        f"val/{name}": value for name, value in measures(prompts, answers, judged, trainer.solved_at).items()
    }
    if teachers and trainer.eval_teachers:
        metrics |= await _teacher_accuracy(system)
    return metrics


def measures(
    prompts: Sequence[Prompt],
    answers: Sequence[Trajectory],
    judged: Sequence[Sequence[Trajectory]],
    solved_at: float,
) -> dict[str, float]:
    """`accuracy` of greedy answers, of the sampled ones what `sampled_measures` gives, and how many of all `failed`."""
    sources = [prompt.data_source for prompt in prompts]
    found = {f"accuracy{name}": value for name, value in _accuracy(prompts, answers).items()}
    if judged:
        unsolved = 0.0 if solved_at > 0 else solved_at - 1.0
        rewards = [[_reward(one, unsolved) for one in samples] for samples in judged]
        found |= sampled_measures(sources, rewards, solved_at)
    failed = Counter(
        source or "all"
        for source, *attempts in zip(sources, answers, *zip(*judged, strict=True), strict=True)
        for one in attempts
        if one.reward is None
    )
    found["failed"] = float(failed.total())
    return found | {f"failed/{source}": float(failed[source]) for source in sorted(failed)}


async def evaluate_model(
    model: str,
    data: str | Path | Sequence[str] | None,
    reward: str | None,
    max_new_tokens: int | None,
    samples: int | None,
    agent: str | None = None,
    *,
    k: int | None = None,
    best: bool = False,
    view: LiveView | None = None,
) -> dict[str, float]:
    """`understudy eval`: a run's latest student (or its best), or any model, on any data, by the run's agent loop or another;
    with `k` samples per problem besides the greedy answer."""
    folder, recipe = Path(model), None
    if (folder / "recipe.json").is_file():
        run = RunDir.open(folder)
        recipe = parse_recipe(run.read_recipe())
        look_in(recipe.run.python_path)
    source = data if data is not None else recipe.data.eval if recipe else None
    judge = reward or (recipe.data.reward if recipe else None)
    if source is None or judge is None:
        raise ConfigError(
            "nothing to measure with: give --data FILE and --reward module:function (from Python: data, reward)"
        )
    if best and recipe is None:
        raise ConfigError(f"--best chooses among the checkpoints of a run, and {model} is none")
    view = view or LiveView(0, enabled=False)
    with view.work(f"loading {recipe.student.model if recipe else model}"):
        student = _student_of(recipe) if recipe else load_model(model)
    if recipe:
        store = CheckpointStore(RunDir.open(folder).checkpoints, recipe.trainer.keep_checkpoints)
        put_student(student.model, store.load(best_step(store) if best else None).policy)
    budget = max_new_tokens or (recipe.rollout.max_new_tokens if recipe else 256)
    max_batch = recipe.rollout.max_batch if recipe else _MAX_BATCH
    rollout = recipe.rollout if recipe else RolloutConfig()
    context = min(rollout.context_length or student.context, student.steady_context)
    engine = student.engine(max_batch, max_length=context)
    renderer = Renderer(
        student.tokenizer,
        context=context,
        reserve=budget,
        template_options=rollout.template_options,
        max_prompt=recipe.data.max_prompt_tokens if recipe else None,
        truncate=recipe is not None and recipe.data.overlong == "truncate_left",
    )
    problems = load_dataset(source, "--data" if data else "data.eval")
    if recipe:
        problems, notes = without_overlong(recipe, problems, "data.eval", student.tokenizer, student.context)
        for note in notes:
            view.note(note)
    prompts = eval_prompts(problems, samples)
    sampling = Sampling(
        budget,
        student.stop_ids,
        stop_strings=tuple(rollout.stop),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
    )
    trainer = recipe.trainer if recipe else TrainerConfig()
    k = trainer.eval_k if k is None else k
    if k > 1 and rollout.temperature == 0:
        raise ConfigError(
            "--k: this run samples at temperature 0, where all samples of a problem are the same"
        )
    loops = LoopChoice(agent or rollout.agent, rollout.agent_options)
    rewards = Rewards([load_reward(judge)], renderer)
    examiner = Examiner(
        engine, loops, rewards, renderer, sampling, context, max_batch, recipe.run.seed if recipe else 0
    )
    try:
        with view.work(f"evaluating on {len(prompts)} problems", len(prompts) * (1 + k)) as advance:
            answers = await examiner.greedy(prompts, advance)
            judged = await examiner.sampled(prompts, k, advance) if k else []
    finally:
        await rewards.close()
        await loops.close()
        await engine.close()
    for failure in examiner.failures[:_SHOWN]:
        view.note(f"{failure.prompt.key} failed and counts as unsolved: {failure.reason}")
    return measures(prompts, answers, judged, trainer.solved_at)


def _student_of(recipe: Recipe) -> LoadedModel:
    """The model `val/accuracy` was measured on: also a GPU's run may be looked at where there is none."""
    student = recipe.student
    here = student.device if torch.cuda.is_available() or not student.device.startswith("cuda") else "auto"
    return load_model(
        student.model,
        dtype=student.dtype,
        device=here,
        trust_remote_code=student.trust_remote_code,
        revision=student.revision,
        attention=student.attention,
    )


def eval_prompts(dataset: Dataset, samples: int | None) -> list[Prompt]:
    """The held-out problems in file order, the first `samples` of them; no shuffling, so every run has the same ones."""
    count = len(dataset) if samples is None else min(samples, len(dataset))
    return [dataset.prompt(i, key=f"eval-{i:07d}", epoch=0) for i in range(count)]


def _accuracy(prompts: Sequence[Prompt], answers: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward over all problems (name "") and per data source (name "/source")."""
    return mean_by_source([prompt.data_source for prompt in prompts], [_reward(one) for one in answers])


def _reward(trajectory: Trajectory, failed: float = 0.0) -> float:
    return failed if trajectory.reward is None else float(trajectory.reward)


async def _bury(system: System, step: int, failures: Sequence[Failure], who: str) -> None:
    """Each failed answer in the ledger, issued and dead, so that it is in the dead-letter file and an audit still balances."""
    for failure in failures:
        name = f"{failure.prompt.key}-step{step:06d}-{who}{failure.asked}"
        key = row_key(name, failure.session)
        # Not new: a launch before has buried it, and kept it.
        if await system.plane.issue(_EVAL, [key], step=step, reserved=True):
            await system.plane.dead_letter(_EVAL, key, failure.reason, {"trace": failure.trace})
    if failures:
        text = f"{len(failures)} held-out answers failed and count as unsolved, first {failures[0].reason}"
        logger.warning("step %d: %s", step, text)
        system.view.note(f"step {step}: {text}; see {system.run.dead_letters}")


async def _teacher_accuracy(system: System) -> dict[str, float]:
    """Each teacher answers the problems it would judge: the mark the student is measured against."""
    assert system.router is not None
    metrics: dict[str, float] = {}
    for name, teacher in system.recipe.teachers.items():
        mine = [prompt for prompt in system.eval_prompts if _sole_teacher(system, prompt) == name]
        if not mine or teacher.placement == "external":
            continue
        loaded = await asyncio.to_thread(
            load_model,
            teacher.model,
            dtype=teacher.dtype,
            device=teacher.device,
            trust_remote_code=teacher.trust_remote_code,
            revision=teacher.revision,
            attention=teacher.attention,
        )
        engine = loaded.engine(system.recipe.rollout.max_batch)
        examiner = Examiner(
            engine, system.loops, system.rewards, system.renderer, system.sampling, loaded.steady_context,
            system.recipe.rollout.max_batch,
        )  # fmt: skip
        text = f"evaluating teacher {name} on {len(mine)} held-out problems"
        try:
            with system.view.work(text, total=len(mine)) as advance:
                answers = await examiner.greedy(mine, advance)
        finally:
            await engine.close()
        await _bury(system, 0, examiner.failures, f"teacher-{name}-")
        metrics |= {
            f"val/teacher_accuracy{key}": value for key, value in _accuracy(mine, answers).items() if key
        }
    return metrics


def _sole_teacher(system: System, prompt: Prompt) -> str | None:
    """Who judges this row; None for a row judged by a mixture, which no single teacher answers for."""
    assert system.router is not None
    if prompt.columns.get(system.recipe.data.mixture_key) is not None:
        return None
    return system.router.route(routing_value(system, prompt))


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
