"""`[data]`: prompts, rewards, and which teacher scores a row."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from understudy.config.base import Section


def _as_list(value: Any) -> Any:
    """Accepts a single source without brackets."""
    return [value] if isinstance(value, str) else value


def _named(sources: list[str]) -> list[str]:
    for one in sources:
        if not one.strip():
            raise ValueError(
                f"{one!r} names no data; expected a jsonl or parquet file, a glob, or a hub dataset ('org/name:train')"
            )
    return sources


_TEXT = {"type": "string"}
Sources = Annotated[
    list[str],
    BeforeValidator(_as_list),
    AfterValidator(_named),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]


class DataConfig(Section):
    """`[data]`: prompts, rewards, and which teacher scores a row."""

    train: Sources
    """jsonl or parquet files with `prompt` or `messages` (every other column is kept), globs, or hub datasets
    (`"org/name:train"`); one source or a list. Paths are relative to the recipe."""
    eval: Sources | None = None
    """Held-out problems in the same format."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Length of the longest prompt, as the student sees it; by default what `rollout.max_new_tokens` leaves of
    the context."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """What happens to a row with a longer prompt: the recipe is refused, the row is dropped, or the first tokens
    of the prompt are cut."""
    max_image_bytes: Annotated[int, Field(ge=1)] = 20_971_520
    """Largest size of a picture file; a row with a larger one becomes a dead letter."""
    max_image_pixels: Annotated[int, Field(ge=1)] = 33_554_432
    """Largest number of pixels of a picture, read from its header before it is decoded."""
    reward: str | None = None
    """`"module:function"`: a function that takes (row, text) and returns a float, or one with verl's `compute_score`
    signature. Accuracy and `task_coef` need it. Modules beside the recipe are found."""
    teacher_key: str = "data_source"
    """The column that chooses the teacher."""
    mixture_key: str = "teacher_weights"
    """A column `{teacher: weight}`; a row that has it is scored by that mixture of teachers."""
    default_teacher: str | None = None
    """The teacher that scores rows whose column names no teacher; without this key they are an error."""
    shuffle: bool = True
    """Shuffle the rows for each pass with `run.seed`; `false` keeps the files' order."""
