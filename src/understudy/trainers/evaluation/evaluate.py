"""Held-out accuracy: the student answers held-out problems and the recipe's reward scores the answers.

`val/accuracy` is measured on greedy answers. With `trainer.eval_k` each problem is also sampled k times at
the rollout's temperature: `val/avg@k`, `val/pass@1` … `val/pass@k`. Every metric comes over all problems and
per data source. Seeds depend on the problem and not on the step, so two evaluations differ only by the
weights.

An answer whose generation or reward failed counts as unsolved. `val/failed` counts them, and each is a dead
letter with its reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from understudy.errors import RankLost
from understudy.observability.faults import point
from understudy.observability.metrics import cut_back, read_metrics
from understudy.planning.resolved import LearnSettings
from understudy.rollout.dataset import Dataset
from understudy.rollout.row_length import longest_row
from understudy.trainers.checkpoints import record_step, save_despite
from understudy.trainers.evaluation.accuracy import mean_by_source, sampled_measures
from understudy.trainers.evaluation.best_checkpoint import MEASURE
from understudy.trainers.evaluation.evaluator import FailedAnswer
from understudy.trainers.models import load_model
from understudy.trainers.produce.produce import routing_value
from understudy.trainers.stopping import Abandoned, Interrupts
from understudy.trainers.system import Producer, System
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory

logger = logging.getLogger(__name__)
_MAX_BATCH = 64
_SHOWN = 3
_EVAL = "eval"
"""The partition of the ledger that holds failed answers."""


async def evaluate(producer: Producer, step: int, teachers: bool = False) -> dict[str, float]:
    """The student's accuracy now, per data source. With `teachers`, also that of each teacher on the rows it
    scores."""
    prompts, settings = producer.eval_prompts, producer.settings.evaluation
    if not prompts:
        return {}
    evaluator = replace(producer.evaluator, failures=[])
    text = f"evaluating on {len(prompts)} held-out problems"
    with (
        producer.state.spans.span("evaluate", step=step),
        producer.state.view.work(text, total=len(prompts) * (1 + settings.k)) as advance,
    ):
        answers = await evaluator.greedy(prompts, advance)
        sampled = await evaluator.sampled(prompts, settings.k, advance) if settings.k else []
    point("evaluation.answered")
    _keep(producer, step, prompts, answers, "student")
    await _dead_letter(producer, step, evaluator.failures, "")
    metrics = {
        f"val/{name}": value
        for name, value in measures(prompts, answers, sampled, settings.solved_at).items()
    }
    if teachers:
        metrics |= await _teacher_accuracy(producer)
    return metrics


def measures(
    prompts: Sequence[Prompt],
    answers: Sequence[Trajectory],
    sampled: Sequence[Sequence[Trajectory]],
    solved_at: float,
) -> dict[str, float]:
    """`accuracy` of the greedy answers, `sampled_measures` of the sampled ones, and how many of all
    `failed`."""
    sources = [prompt.data_source for prompt in prompts]
    found = {f"accuracy{name}": value for name, value in _accuracy(prompts, answers).items()}
    if sampled:
        unsolved = 0.0 if solved_at > 0 else solved_at - 1.0
        rewards = [[_reward(one, unsolved) for one in samples] for samples in sampled]
        found |= sampled_measures(sources, rewards, solved_at)
    failed = Counter(
        source or "all"
        for source, *attempts in zip(sources, answers, *zip(*sampled, strict=True), strict=True)
        for one in attempts
        if one.reward is None
    )
    found["failed"] = float(failed.total())
    return found | {f"failed/{source}": float(failed[source]) for source in sorted(failed)}


def eval_prompts(dataset: Dataset, samples: int | None) -> list[Prompt]:
    """The first `samples` held-out problems in file order. Not shuffled, so every run has the same ones."""
    count = len(dataset) if samples is None else min(samples, len(dataset))
    return [dataset.prompt(i, key=f"eval-{i:07d}", epoch=0) for i in range(count)]


def _accuracy(prompts: Sequence[Prompt], answers: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward over all problems (name "") and per data source (name "/source")."""
    return mean_by_source([prompt.data_source for prompt in prompts], [_reward(one) for one in answers])


def _reward(trajectory: Trajectory, failed: float = 0.0) -> float:
    return failed if trajectory.reward is None else float(trajectory.reward)


async def _dead_letter(producer: Producer, step: int, failures: Sequence[FailedAnswer], who: str) -> None:
    """Issues and dead-letters each failed answer, so that it is in the dead-letter file and an audit still
    balances."""
    for failure in failures:
        name = f"{failure.prompt.key}-step{step:06d}-{who}{failure.asked}"
        key = row_key(name, failure.session)
        # Not issued: an earlier launch has dead-lettered it already.
        if await producer.state.plane.issue(_EVAL, [key], step=step, reserved=True):
            await producer.state.plane.dead_letter(_EVAL, key, failure.reason, {"trace": failure.trace})
    if failures:
        some = f"{len(failures)} held-out answer{'s' if len(failures) > 1 else ''}"
        text = f"{some} failed (counted as unsolved), first {failures[0].reason}"
        logger.warning("step %d: %s", step, text)
        producer.state.view.note(f"step {step}: {text}; see {producer.state.run.dead_letters}")


async def _teacher_accuracy(producer: Producer) -> dict[str, float]:
    """The accuracy of each teacher on the problems it scores, as a baseline for the student."""
    metrics: dict[str, float] = {}
    for name, teacher in producer.settings.evaluation.teachers.items():
        mine = [prompt for prompt in producer.eval_prompts if _sole_teacher(producer, prompt) == name]
        if not mine:
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
        if producer.renderer.pictures is not None:
            loaded = loaded.with_pictures(producer.renderer.pictures.store, teacher.model, teacher.revision)
        rollout = producer.settings.rollout
        # As much room as the student has: an engine on a GPU reserves memory for rows of this length.
        context = min(rollout.context_length or loaded.steady_context, loaded.steady_context)
        longest = longest_row(producer.renderer, mine, rollout.agent, rollout.max_new_tokens) or context
        engine = loaded.engine(producer.evaluator.max_batch, max_length=min(longest, context))
        evaluator = replace(producer.evaluator, engine=engine, context=context, seed=0, failures=[])
        text = f"evaluating teacher {name} on {len(mine)} held-out problems"
        try:
            with producer.state.view.work(text, total=len(mine)) as advance:
                answers = await evaluator.greedy(mine, advance)
        finally:
            await engine.close()
        _keep(producer, 0, mine, answers, f"teacher {name}")
        await _dead_letter(producer, 0, evaluator.failures, f"teacher-{name}-")
        metrics |= {
            f"val/teacher_accuracy{key}": value for key, value in _accuracy(mine, answers).items() if key
        }
    return metrics


def _sole_teacher(producer: Producer, prompt: Prompt) -> str | None:
    """The teacher that scores this row; None for a row that a mixture scores."""
    assert producer.teachers.router is not None
    if prompt.columns.get(producer.settings.mixture_key) is not None:
        return None
    return producer.teachers.router.route(routing_value(producer, prompt))


def _keep(
    producer: Producer, step: int, prompts: Sequence[Prompt], answers: Sequence[Trajectory], model: str
) -> None:
    """Appends every answer to samples.jsonl. `model`: "student", or "teacher NAME"."""
    with producer.state.run.samples.open("a") as handle:
        for prompt, trajectory in zip(prompts, answers, strict=True):
            if not trajectory.loss_mask.any():  # its agent loop failed: a dead letter says why
                continue
            line = {
                "step": step,
                "model": model,
                "key": prompt.key,
                "source": prompt.data_source,
                "prompt": prompt.text if prompt.text is not None else _shown(prompt.messages[-1]),
                "text": producer.renderer.decode(trajectory.tokens[trajectory.loss_mask]),
                "answer": None if (answer := prompt.columns.get("answer")) != answer else answer,
                "reward": trajectory.reward,
                "stop_reason": str(trajectory.stop_reason),
            }
            if trajectory.media:
                line["media"] = list(trajectory.media)
            # An answer from parquet may be a decimal, a date or bytes; a NaN would be no JSON.
            handle.write(json.dumps(line, default=str) + "\n")


def _shown(message: Mapping[str, Any]) -> str:
    """A message as text; a picture is named by the beginning of its hash."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(
        str(part["text"]) if "text" in part else f"[picture {str(part.get('image')).partition(':')[2][:12]}]"
        for part in content
    )


def evaluation_due(settings: LearnSettings, step: int) -> bool:
    """Whether the student is evaluated after `step`: after the last step, and every `trainer.eval_every` steps. In a fully async
    run an evaluation that is due inside a window waits for the window's publish."""
    windows, every = settings.windows, settings.trainer.eval_every
    window = windows.of_step(step)
    published = windows.first_step(window) - 1
    due = step == settings.trainer.steps or (every > 0 and step // every > published // every)
    return due and step == windows.last_step(window)


def lacks_evaluation(metrics: Path, step: int) -> bool:
    """Whether the metrics of a step have no held-out accuracy."""
    return any(line["step"] == step and MEASURE not in line for line in read_metrics(metrics))


async def evaluate_first(system: System, stop: Interrupts) -> None:
    """The evaluation before a launch's first step. A new run: of student and teachers; there is nothing to save yet. A resumed run:
    of the step it continues from, if that one lacks its evaluation."""
    step = system.learner.policy.step
    with suppress(Abandoned):
        if step > 0:
            await _evaluate_again(system, step, stop)
        elif line := await stop.waiting(evaluate(system.producer, step=0, teachers=True)):
            await record_step(system, 0, line)


async def _evaluate_again(system: System, step: int, stop: Interrupts) -> None:
    """Evaluates a saved step whose evaluation was cut short by a stop request or failed, and completes its metrics."""
    state = system.state
    due = evaluation_due(system.learner.settings, step) and lacks_evaluation(state.run.metrics, step)
    if not due or not system.producer.eval_prompts:
        return
    cut_back(state.run.samples, step - 1)  # answers that the first attempt may have written
    line = state.metrics.complete(step, await stop.waiting(evaluate(system.producer, step)))
    state.view.step(line)
    if system.learner.settings.trainer.keep_best and state.saves.best.consider(step, line):
        await asyncio.to_thread(state.saves.best.mark, state.saves.store)
    if state.callbacks is not None:
        await state.callbacks.evaluation(step, line)


async def evaluated(system: System, step: int, line: dict[str, Any], stop: Interrupts) -> dict[str, Any]:
    """The metrics of the step just taken, with held-out accuracy unless a stop request cut the evaluation
    short.

    If the evaluation fails, the step is saved before the error is raised. In both cases a resume evaluates the step first."""
    try:
        return line | await stop.waiting(evaluate(system.producer, step))
    except Abandoned:
        if system.producer.eval_prompts:
            system.state.view.note(f"the evaluation after step {step} was cut short; a resume runs it")
        return line
    except RankLost:
        raise
    except Exception as error:
        system.state.view.step(system.state.metrics.write(step, line))
        system.state.view.note(f"the evaluation after step {step} failed ({error})")
        await save_despite(system, step, error)
        raise
