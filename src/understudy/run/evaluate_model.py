"""Evaluates a run's student, or any model, outside of training (`understudy eval`).

The metrics are those of `trainers/evaluation/evaluate.py`. Failed answers count as unsolved; the first few
are shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedTokenizerBase

from understudy.assembly.usable_ids import kept_usable_ids
from understudy.config import DataConfig, StudentConfig, parse_recipe
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
from understudy.rollout.loading import set_python_path
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Reward, Rewards, load_reward
from understudy.rollout.row_length import longest_row
from understudy.run.measurable import check_counts, check_measurable
from understudy.trainers.evaluation.best_checkpoint import best_step
from understudy.trainers.evaluation.evaluate import _MAX_BATCH, _SHOWN, eval_prompts, measures
from understudy.trainers.evaluation.evaluator import Evaluator
from understudy.trainers.models import LoadedModel, load_model, put_student
from understudy.trainers.prompt_data import without_overlong
from understudy.types.prompt import Prompt
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
    max_batch: int | None = None,
    dtype: str | None = None,
    best: bool = False,
    answers_to: Path | None = None,
    view: LiveView | None = None,
) -> dict[str, float]:
    """Evaluates `model` on `data`: greedy answers, and `k` samples per problem. `answers_to`: a file that gets every
    problem's row with its greedy answer in the column `written`, for example for `rollout.off_policy`. `max_batch`: how many
    answers are written at the same time. `dtype`: for a model that is not a run.

    `model` is a run directory (its latest student, or with `best` its best one) or any model. A run's recipe
    gives the defaults of the other arguments."""
    check_measurable(model, data, reward, best=best)
    check_counts(samples, k, max_new_tokens, max_batch)
    subject = _Subject.of(model)
    if subject.run is not None and dtype is not None:
        raise ConfigError("--dtype is for a model that is not a run; a run's student is measured in its own")
    settings = _Settings.of(subject, data, reward, max_new_tokens, agent, k, max_batch)
    view = view or LiveView(0, enabled=False)
    dataset = load_dataset(settings.source, settings.place)  # before the model, which may take minutes
    async with AsyncExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory(prefix="understudy-eval-"))
        media = MediaStore(subject.run.media if subject.run else scratch)
        student = _load(subject, media, best, view, dtype or "float32")
        renderer = _renderer(subject, settings, student)
        if settings.rollout.max_new_tokens >= renderer.context:
            raise ConfigError(
                f"--max-new-tokens {settings.rollout.max_new_tokens} leaves no room for a problem: {subject.name} holds "
                f"{renderer.context} tokens; lower it (from Python: max_new_tokens)"
            )
        problems = _problems(subject, settings, dataset.storing(Pictures(media)), student, view)
        prompts = eval_prompts(problems, samples)
        evaluator = _evaluator(subject, settings, student, renderer, prompts, stack)
        count = len(prompts) * (1 + settings.k)
        with view.work(f"evaluating on {many(len(prompts), 'problem')}", count) as advance:
            answers = await evaluator.greedy(prompts, advance)
            sampled = await evaluator.sampled(prompts, settings.k, advance) if settings.k else []
    if answers_to is not None:
        _write_answers(answers_to, problems, answers, student.tokenizer)
    for failure in evaluator.failures[:_SHOWN]:
        view.note(f"{failure.prompt.key} failed and counts as unsolved: {failure.reason}")
    return measures(prompts, answers, sampled, subject.trainer.solved_at)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is evaluated: a run's student with sections of its recipe, or any model with the defaults here."""

    name: str
    run: RunDir | None = None
    student: StudentConfig | None = None
    data: DataConfig | None = None
    rollout: RolloutConfig = field(
        default_factory=partial(RolloutConfig, max_batch=_MAX_BATCH, max_new_tokens=256)
    )
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = 0

    @classmethod
    def of(cls, model: str) -> _Subject:
        """Also makes modules of the run and of the working directory importable, for rewards and agent loops."""
        folder, here = Path(model), str(Path.cwd())
        if not (folder / "recipe.json").is_file():
            set_python_path([here])
            return cls(model)
        run = RunDir.open(folder)
        table = run.read_recipe()
        run.check_restored(table, "student", "data", "rollout")
        recipe = parse_recipe(stored(table))
        student = recipe.student
        check_present(student.model, "student.model", student.revision)
        set_python_path([*recipe.run.python_path, here])
        return cls(student.model, run, student, recipe.data, recipe.rollout, recipe.trainer, recipe.run.seed)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments; the model's run says what those are that were not given."""

    source: str | Path | Sequence[str]
    place: str
    """The argument or recipe key that names `source`, for errors."""
    reward: Reward
    rollout: RolloutConfig
    k: int

    @classmethod
    def of(
        cls,
        subject: _Subject,
        data: str | Path | Sequence[str] | None,
        reward: str | None,
        max_new_tokens: int | None,
        agent: str | None,
        k: int | None,
        max_batch: int | None,
    ) -> _Settings:
        own, rollout = subject.data, subject.rollout
        source = own.eval if data is None and own else data
        name = reward or (own.reward if own else None)
        assert source is not None and name is not None  # by `check_measurable`
        k = subject.trainer.eval_k if k is None else k
        if k > 1 and rollout.temperature == 0:
            raise ConfigError(
                "--k: this run samples at temperature 0, where all samples of a problem are the same"
            )
        given = {
            "agent": agent or rollout.agent,
            "max_new_tokens": max_new_tokens or rollout.max_new_tokens,
            "max_batch": max_batch or rollout.max_batch,
        }
        judge = load_reward(name, key="--reward" if reward else "data.reward")
        return cls(source, "--data" if data else "data.eval", judge, rollout.model_copy(update=given), k)


def _load(subject: _Subject, media: MediaStore, best: bool, view: LiveView, dtype: str) -> LoadedModel:
    with view.work(f"loading {subject.name}"):
        student = _student_of(subject.student) if subject.student else load_model(subject.name, dtype=dtype)
    student = student.with_pictures(
        media, subject.name, subject.student.revision if subject.student else None
    )
    if subject.run:
        store = CheckpointStore(subject.run.checkpoints, subject.trainer.keep_checkpoints)
        checkpoint = store.load(best_step(store) if best else None, optimizer=False)
        put_student(student.model, checkpoint.policy)
    return student


def _renderer(subject: _Subject, settings: _Settings, student: LoadedModel) -> Renderer:
    data, rollout = subject.data, settings.rollout
    return Renderer(
        student.tokenizer,
        context=min(rollout.context_length or student.context, student.steady_context),
        reserve=rollout.max_new_tokens,
        template_options=rollout.for_templates,
        max_prompt=data.max_prompt_tokens if data else None,
        truncate=data is not None and data.overlong == "truncate_left",
        pictures=student.pictures,
    )


def _problems(
    subject: _Subject, settings: _Settings, problems: Dataset, student: LoadedModel, view: LiveView
) -> Dataset:
    """The problems to answer; those that are too long are handled as the run's `data.overlong` says."""
    if subject.data is None:
        return problems
    problems, notes = without_overlong(
        subject.data,
        settings.rollout,
        problems,
        settings.place,
        student.tokenizer,
        prompt_limits(subject.data, settings.rollout, student.context),
        student.pictures.processor if student.pictures is not None else None,
    )
    for note in notes:
        view.note(note)
    return problems


def _evaluator(
    subject: _Subject,
    settings: _Settings,
    student: LoadedModel,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    stack: AsyncExitStack,
) -> Evaluator:
    """`stack` closes its engine, loops and rewards."""
    rollout, context = settings.rollout, renderer.context
    longest = longest_row(renderer, prompts, rollout.agent, rollout.max_new_tokens) or context
    engine = student.engine(rollout.max_batch, max_length=min(longest, context))
    stack.push_async_callback(engine.close)
    sampling = _sampling(rollout, student, subject.run)
    loops = LoopChoice(rollout.agent, rollout.agent_options)
    stack.push_async_callback(loops.close)
    rewards = Rewards([settings.reward], renderer)
    stack.push_async_callback(rewards.close)
    return Evaluator(
        engine, loops, rewards, renderer, sampling, context, rollout.max_batch, rollout.deadline_seconds, subject.seed,
        rollout.max_trajectory_tokens,
    )  # fmt: skip


def _sampling(rollout: RolloutConfig, student: LoadedModel, run: RunDir | None) -> Sampling:
    """The run's sampling, over the ids that it may use; a model that reads pictures never writes their
    placeholders."""
    rows = student.model.get_output_embeddings().weight.shape[0]
    usable = kept_usable_ids(run) if run else None
    if usable is None and student.pictures is not None:
        usable = UsableIds(rows).without(student.pictures.processor.placeholder_ids)
    cut = usable.within(rows) if usable is not None else None
    return Sampling(
        rollout.max_new_tokens,
        student.stop_ids,
        stop_strings=tuple(rollout.stop),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        usable=cut,
        head_rows=rows if cut is not None else 0,
    )


def _write_answers(
    path: Path, problems: Dataset, answers: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> None:
    """One JSON line per problem, in their order. Answers that failed or were cut off are left out: a cut one
    would teach the student to stop there."""
    lines = []
    for row, answer in zip(problems.rows, answers, strict=False):
        if answer.stop_reason in (StopReason.EOS, StopReason.STOP_STRING):
            ids = answer.tokens[answer.loss_mask].tolist()
            line = {
                **row,
                "written": tokenizer.decode(ids, skip_special_tokens=True),
                "written_reward": answer.reward,
            }
            lines.append(json.dumps(line, ensure_ascii=False, default=str) + "\n")
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
