"""Evaluates a run's student, or any model, outside of training (`understudy eval`).

The metrics are those of `trainers/evaluation/evaluate.py`. Failed answers count as unsolved; the first few
are shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedTokenizerBase

from understudy.config import StudentConfig, parse_recipe
from understudy.config.recipe import stored
from understudy.config.rollout import RolloutConfig
from understudy.config.trainer import TrainerConfig
from understudy.engines.base import Sampling
from understudy.errors import ConfigError
from understudy.media.pictures import Pictures
from understudy.media.store import MediaStore
from understudy.observability.live import LiveView
from understudy.observability.report import many
from understudy.observability.rundir import RunDir, write_atomically
from understudy.planning.models.opened import check_present
from understudy.planning.overlong import prompt_limits
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.loading import look_in
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards, load_reward
from understudy.rollout.row_length import longest_row
from understudy.run.measurable import check_measurable
from understudy.trainers.evaluation.best_checkpoint import best_step
from understudy.trainers.evaluation.evaluate import _MAX_BATCH, _SHOWN, eval_prompts, measures
from understudy.trainers.evaluation.evaluator import Evaluator
from understudy.trainers.models import LoadedModel, load_model, put_student
from understudy.trainers.prompt_data import without_overlong
from understudy.types.trajectory import StopReason, Trajectory
from understudy.types.usable_ids import UsableIds


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
    answers_to: Path | None = None,
    view: LiveView | None = None,
) -> dict[str, float]:
    """Evaluates `model` on `data`: greedy answers, and `k` samples per problem. `answers_to`: a file that gets every
    problem's row with its greedy answer in the column `written`, for example for `rollout.off_policy`.

    `model` is a run directory (its latest student, or with `best` its best one) or any model. A run's recipe
    gives the defaults of the other arguments."""
    check_measurable(model, data, reward, best=best)
    folder, recipe = Path(model), None
    if (folder / "recipe.json").is_file():
        recipe = parse_recipe(stored(RunDir.open(folder).read_recipe()))
        check_present(recipe.student.model, "student.model", recipe.student.revision)
    look_in([*(recipe.run.python_path if recipe else []), str(Path.cwd())])
    source = data if data is not None else recipe.data.eval if recipe else None
    reward_name = reward or (recipe.data.reward if recipe else None)
    assert source is not None and reward_name is not None
    view = view or LiveView(0, enabled=False)
    scratch = TemporaryDirectory(prefix="understudy-eval-")
    with view.work(f"loading {recipe.student.model if recipe else model}"):
        student = _student_of(recipe.student) if recipe else load_model(model)
    media = RunDir.open(folder).media if recipe else Path(scratch.name)
    student = student.reading(MediaStore(media), recipe.student.model if recipe else model)
    if recipe:
        store = CheckpointStore(RunDir.open(folder).checkpoints, recipe.trainer.keep_checkpoints)
        put_student(student.model, store.load(best_step(store) if best else None).policy)
    budget = max_new_tokens or (recipe.rollout.max_new_tokens if recipe else 256)
    max_batch = recipe.rollout.max_batch if recipe else _MAX_BATCH
    rollout = recipe.rollout if recipe else RolloutConfig()
    context = min(rollout.context_length or student.context, student.steady_context)
    renderer = Renderer(
        student.tokenizer,
        context=context,
        reserve=budget,
        template_options=rollout.template_options,
        max_prompt=recipe.data.max_prompt_tokens if recipe else None,
        truncate=recipe is not None and recipe.data.overlong == "truncate_left",
        pictures=student.pictures,
    )
    problems = load_dataset(source, "--data" if data else "data.eval").storing(Pictures(MediaStore(media)))
    if recipe:
        problems, notes = without_overlong(
            recipe.data,
            recipe.rollout,
            problems,
            "data.eval",
            student.tokenizer,
            prompt_limits(recipe.data, recipe.rollout, student.context),
            student.pictures.processor if student.pictures is not None else None,
        )
        for note in notes:
            view.note(note)
    prompts = eval_prompts(problems, samples)
    longest = longest_row(renderer, prompts, agent or rollout.agent, budget) or context
    engine = student.engine(max_batch, max_length=min(longest, context))
    usable = None
    rows = student.model.get_output_embeddings().weight.shape[0]
    if student.pictures is not None:
        usable = UsableIds(rows).without(student.pictures.processor.placeholder_ids)
    sampling = Sampling(
        budget,
        student.stop_ids,
        stop_strings=tuple(rollout.stop),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        usable=usable,
        head_rows=rows if usable is not None else 0,
    )
    trainer = recipe.trainer if recipe else TrainerConfig()
    k = trainer.eval_k if k is None else k
    if k > 1 and rollout.temperature == 0:
        raise ConfigError(
            "--k: this run samples at temperature 0, where all samples of a problem are the same"
        )
    loops = LoopChoice(agent or rollout.agent, rollout.agent_options)
    rewards = Rewards([load_reward(reward_name)], renderer)
    evaluator = Evaluator(
        engine, loops, rewards, renderer, sampling, context, max_batch, rollout.deadline_seconds,
        recipe.run.seed if recipe else 0,
    )  # fmt: skip
    try:
        with view.work(f"evaluating on {many(len(prompts), 'problem')}", len(prompts) * (1 + k)) as advance:
            answers = await evaluator.greedy(prompts, advance)
            sampled = await evaluator.sampled(prompts, k, advance) if k else []
    finally:
        await rewards.close()
        await loops.close()
        await engine.close()
        scratch.cleanup()
    if answers_to is not None:
        _write_answers(answers_to, problems, answers, student.tokenizer)
    for failure in evaluator.failures[:_SHOWN]:
        view.note(f"{failure.prompt.key} failed and counts as unsolved: {failure.reason}")
    return measures(prompts, answers, sampled, trainer.solved_at)


def _write_answers(
    path: Path, problems: Dataset, answers: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> None:
    """One JSON line per problem, in their order. Answers that failed or were cut off are left out: a cut one
    would teach the student to stop there."""
    lines = []
    for row, answer in zip(problems.rows, answers, strict=False):
        if answer.stop_reason in (StopReason.EOS, StopReason.STOP_STRING):
            ids = answer.tokens[answer.loss_mask].tolist()
            told = {
                **row,
                "written": tokenizer.decode(ids, skip_special_tokens=True),
                "written_reward": answer.reward,
            }
            lines.append(json.dumps(told, ensure_ascii=False, default=str) + "\n")
    write_atomically(path, "".join(lines))


def _student_of(student: StudentConfig) -> LoadedModel:
    """The run's student before training. A run from a GPU is loaded on the CPU where there is no GPU."""
    here = student.device if torch.cuda.is_available() or not student.device.startswith("cuda") else "auto"
    return load_model(
        student.model,
        dtype=student.dtype,
        device=here,
        trust_remote_code=student.trust_remote_code,
        revision=student.revision,
        attention=student.attention,
    )
