"""Teachers with another tokenizer: `vocabulary = "align"` in `[teachers.NAME]`."""

from __future__ import annotations

from understudy.config.checks.objective import DIVERGENCES
from understudy.config.tables import RecipeTables

NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Keys of `[rollout]` and the values at which a token's log-probability as drawn is the student's own."""


def aligned_teacher_problems(recipe: RecipeTables) -> list[str]:
    names = [name for name, teacher in recipe.teachers.items() if teacher.vocabulary == "align"]
    if not names or recipe.loss.distill_coef == 0:
        return []
    given = f"teachers.{names[0]}.vocabulary = 'align'"
    return [*_loss_problems(recipe, given), *_run_problems(recipe, given)]


def _loss_problems(recipe: RecipeTables, given: str) -> list[str]:
    loss, rollout, problems = recipe.loss, recipe.rollout, []
    if loss.signal in ("at_ids", "hidden"):
        problems.append(
            f"{given} with loss.signal = {loss.signal!r}: it is about ids of one vocabulary; use 'topk' or 'sampled'"
        )
    if loss.kind in DIVERGENCES:
        if loss.tail != "bucket":
            problems.append(
                f"{given} with loss.tail = {loss.tail!r}: candidates that the student has no token for belong to the tail; use 'bucket'"
            )
        return problems
    if loss.discount > 0:
        problems.append(
            f"{given} with loss.discount = {loss.discount:g}: each token of a chain has the whole chain's difference, and a sum over "
            "tokens would count it several times; set discount = 0"
        )
    if rollout.temperature != loss.student_temperature:
        problems.append(
            f"{given} with loss.kind = {loss.kind!r}: rollout.temperature = {rollout.temperature:g} and loss.student_temperature = "
            f"{loss.student_temperature:g} differ, and chains of tokens are compared by their log-probabilities as drawn; set both to one value"
        )
    problems += [
        f"{given} with loss.kind = {loss.kind!r} and rollout.{key} = {getattr(rollout, key)}: chains of tokens are compared by their "
        f"log-probabilities as drawn, which this key changes; leave rollout.{key} out"
        for key, value in NEUTRAL_SAMPLING.items()
        if getattr(rollout, key) != value
    ]
    return problems


def _run_problems(recipe: RecipeTables, given: str) -> list[str]:
    problems = []
    if recipe.rollout.agent != "single_turn":
        problems.append(
            f"{given} with rollout.agent = {recipe.rollout.agent!r}: a completion is aligned if it is one turn; use 'single_turn'"
        )
    if recipe.dataplane.backend != "embedded":
        problems.append(
            f"{given} with dataplane.backend = {recipe.dataplane.backend!r}: rows are aligned in the trainer's process, which must hold "
            "their tokens; use 'embedded'"
        )
    if recipe.trainer.eval_teachers:
        problems.append(
            f"{given} with trainer.eval_teachers: a teacher's accuracy is measured with the student's tokenizer; leave it out, and use "
            "`understudy eval` on the teacher"
        )
    return problems
