"""Working memory of a recipe's processes on a GPU: what each needs at its peak beyond weights and optimizer.

Rows are counted as long as they may be: `rollout.context_length`, or the student's own limit, without a look at the data: a run
whose prompts are short needs less. A process of a model whose
layers are not known (`shapes.py`), or that is not downloaded yet, counts as 0.
"""

from __future__ import annotations

from understudy.config import Recipe, TeacherConfig
from understudy.planning.memory.shapes import DecoderShape
from understudy.planning.models.folder import ModelFolder, is_hub_id

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


def longest_row(recipe: Recipe) -> int:
    shape = _shape(recipe.student.model)
    return recipe.rollout.context_length or (shape.context if shape else 0)


def trainer_work(recipe: Recipe, *, generates: bool = True) -> int:
    """Peak of the trainer's process: forward and backward, or prompts in an engine of its own, with the engine's
    pool; of a rank that does not generate, forward and backward."""
    shape = _shape(recipe.student.model)
    if shape is None:
        return 0
    width, longest = WIDTH[recipe.student.dtype], longest_row(recipe)
    rows, trainer = recipe.trainer.batch_size * recipe.rollout.n, recipe.trainer
    tokens = min(max(trainer.micro_batch_tokens, longest), rows * longest)
    trained = min(tokens, -(-tokens // max(longest, 1)) * recipe.rollout.max_new_tokens)
    training = shape.training(
        tokens,
        trained,
        width,
        compiled=recipe.student.compile,
        checkpointed=recipe.student.gradient_checkpointing,
        whole_rows=recipe.loss.signal == "hidden",
    )
    if not generates or not engine_inside(recipe):
        return training
    held, reading = engine_work(recipe)
    return held + max(training, reading) + copied_weights(recipe)


def engine_inside(recipe: Recipe) -> bool:
    """Whether the trainer's own process generates."""
    return recipe.rollout.engine == "hf" and not recipe.rollout.processes


def copied_weights(recipe: Recipe) -> int:
    """An engine in the trainer's process has its own weights unless it shares the trained ones (sync, one rank, no adapters)."""
    shared = recipe.trainer.mode == "sync" and recipe.trainer.ranks == 1 and recipe.student.lora is None
    if shared or is_hub_id(recipe.student.model):
        return 0
    folder = ModelFolder.open(recipe.student.model, "student.model")
    return folder.parameters * WIDTH[recipe.student.dtype]


def engine_work(recipe: Recipe) -> tuple[int, int]:
    """(the pool of keys and values, peak of prompts) of one engine."""
    shape, rollout = _shape(recipe.student.model), recipe.rollout
    if shape is None:
        return 0, 0
    width, longest = WIDTH[recipe.student.dtype], longest_row(recipe)
    pool = shape.keys_and_values(rollout.max_batch, longest, width, rollout.kv_cache == "fp8")
    return pool, shape.prefill(rollout.max_batch * longest, width)


def replica_work(recipe: Recipe, teacher: TeacherConfig) -> int:
    """Peak of one forward of a replica."""
    shape = _shape(teacher.model)
    if shape is None:
        return 0
    longest = teacher.context_length or longest_row(recipe)
    tokens = min(
        max(teacher.max_batch_tokens, longest), recipe.trainer.batch_size * recipe.rollout.n * longest
    )
    scored = min(tokens, -(-tokens // max(longest, 1)) * recipe.rollout.max_new_tokens)
    return shape.scoring(tokens, scored, WIDTH[teacher.dtype]) // teacher.tensor_parallel


def _shape(model: str) -> DecoderShape | None:
    return None if is_hub_id(model) else DecoderShape.of(ModelFolder.open(model, "model"))
