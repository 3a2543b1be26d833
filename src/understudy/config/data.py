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
    """jsonl or parquet files with `prompt` or `messages` (every other column is kept), globs, or hub
    datasets (`"org/name:train"`); one, or a list. Relative to the recipe."""
    eval: Sources | None = None
    """Held-out problems of the same shape."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """The longest prompt, as the student sees it; what the context leaves beside `rollout.max_new_tokens`
    when not set."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """What happens to a row with a longer prompt: the recipe is refused, the row is dropped, or the prompt
    loses its first tokens."""
    max_image_bytes: Annotated[int, Field(ge=1)] = 20_971_520
    """The largest file of a picture; the row of a larger one becomes a dead letter."""
    max_image_pixels: Annotated[int, Field(ge=1)] = 33_554_432
    """The most pixels of a picture, read from its header before it is decoded."""
    reward: str | None = None
    """`"module:function"` taking (row, text) and giving a float, or with verl's `compute_score` signature;
    needed for accuracy and for `task_coef`. Modules beside the recipe are found."""
    teacher_key: str = "data_source"
    """The column that chooses the teacher."""
    mixture_key: str = "teacher_weights"
    """A column `{teacher: weight}`; a row that has it is scored by that mixture of teachers instead."""
    default_teacher: str | None = None
    """Scores rows whose column names no teacher; without it they are an error."""
    shuffle: bool = True
    """Take rows in an order drawn anew for each pass from `run.seed`; false keeps the files' order."""
