"""Held-out accuracy: the student answers held-out problems and the recipe's reward judges the answers.

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
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from understudy.errors import RankLost
from understudy.rollout.dataset import Dataset
from understudy.trainers.checkpoints import finish_saving, save_checkpoint
from understudy.trainers.evaluation.accuracy import mean_by_source, sampled_measures
from understudy.trainers.evaluation.examiner import Examiner, Failure
from understudy.trainers.models import load_model
from understudy.trainers.produce.produce import routing_value
from understudy.trainers.stopping import Abandoned, Interrupts
from understudy.trainers.system import System
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory

logger = logging.getLogger(__name__)
_KEPT_SAMPLES = 8
"""Rollouts per data source that go to samples.jsonl at each evaluation."""
_MAX_BATCH = 64
_SHOWN = 3
_EVAL = "eval"
"""The partition of the ledger that holds failed answers."""


async def evaluate(system: System, step: int, teachers: bool = False) -> dict[str, float]:
    """The student's accuracy now, per data source. With `teachers`, also that of each teacher on the rows it
    scores."""
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
    """`accuracy` of the greedy answers, `sampled_measures` of the sampled ones, and how many of all
    `failed`."""
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


def eval_prompts(dataset: Dataset, samples: int | None) -> list[Prompt]:
    """The first `samples` held-out problems in file order. Not shuffled, so every run has the same ones."""
    count = len(dataset) if samples is None else min(samples, len(dataset))
    return [dataset.prompt(i, key=f"eval-{i:07d}", epoch=0) for i in range(count)]


def _accuracy(prompts: Sequence[Prompt], answers: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward over all problems (name "") and per data source (name "/source")."""
    return mean_by_source([prompt.data_source for prompt in prompts], [_reward(one) for one in answers])


def _reward(trajectory: Trajectory, failed: float = 0.0) -> float:
    return failed if trajectory.reward is None else float(trajectory.reward)


async def _bury(system: System, step: int, failures: Sequence[Failure], who: str) -> None:
    """Issues and dead-letters each failed answer, so that it is in the dead-letter file and an audit still
    balances."""
    for failure in failures:
        name = f"{failure.prompt.key}-step{step:06d}-{who}{failure.asked}"
        key = row_key(name, failure.session)
        # Not issued: an earlier launch has dead-lettered it already.
        if await system.plane.issue(_EVAL, [key], step=step, reserved=True):
            await system.plane.dead_letter(_EVAL, key, failure.reason, {"trace": failure.trace})
    if failures:
        text = f"{len(failures)} held-out answers failed and count as unsolved, first {failures[0].reason}"
        logger.warning("step %d: %s", step, text)
        system.view.note(f"step {step}: {text}; see {system.run.dead_letters}")


async def _teacher_accuracy(system: System) -> dict[str, float]:
    """The accuracy of each teacher on the problems it scores, as a baseline for the student."""
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
    """The teacher that scores this row; None for a row that a mixture scores."""
    assert system.router is not None
    if prompt.columns.get(system.recipe.data.mixture_key) is not None:
        return None
    return system.router.route(routing_value(system, prompt))


def _keep(system: System, step: int, answers: Sequence[Trajectory]) -> None:
    """Appends a few answers to samples.jsonl, always for the same problems. The report shows them."""
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


async def evaluate_first(system: System, stop: Interrupts) -> None:
    """Evaluates student and teachers before the first step. There is nothing to save yet."""
    with suppress(Abandoned):
        line = await stop.waiting(evaluate(system, step=0, teachers=True))
        if line:
            system.view.step(system.metrics.write(0, line))


async def evaluated(system: System, step: int, line: dict[str, Any], stop: Interrupts) -> dict[str, Any]:
    """The metrics of the step just taken, with held-out accuracy unless a stop request cut the evaluation
    short.

    If the evaluation fails, the step is saved before the error is raised."""
    try:
        return line | await stop.waiting(evaluate(system, step))
    except Abandoned:
        return line
    except RankLost:
        raise
    except Exception as error:
        system.view.step(system.metrics.write(step, line))
        try:
            await save_checkpoint(system, step)
            await finish_saving(system)
        except Exception:
            logger.exception("step %d could not be saved after its evaluation failed", step)
        else:
            system.view.note(f"the evaluation after step {step} failed ({error}); the step itself is saved")
        raise
