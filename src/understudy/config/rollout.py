"""`[rollout]` and `[data]`: what the student attempts, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from understudy.config.base import Section


class RolloutConfig(Section):
    engine: Literal["hf"] = "hf"
    """What generates: `hf` runs in this process."""
    agent: str = "single_turn"
    """A shipped agent loop, or `"module:Class"`; an `agent` column of a row wins over this."""
    n: Annotated[int, Field(ge=1)] = 1
    """Sessions per prompt."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    max_batch: Annotated[int, Field(ge=1)] = 128
    """Requests the engine decodes together."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps every token."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    deadline_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A rollout that takes longer becomes a dead letter."""


class DataConfig(Section):
    train: str
    """jsonl or parquet with `prompt` or `messages`; every other column is kept."""
    eval: str | None = None
    """Held-out problems of the same shape."""
    reward: str | None = None
    """`"module:function"` taking (row, text) and giving a float; needed for accuracy and for `task_coef`."""
    teacher_key: str = "data_source"
    """The column that chooses the teacher."""
    default_teacher: str | None = None
    """Takes rows whose column names no teacher; without it they are an error."""
    shuffle: bool = True
