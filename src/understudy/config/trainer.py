"""`[trainer]`, `[cluster]` and `[run]`: how the run proceeds, where it sits, what it leaves behind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from understudy.config.base import Section


class TrainerConfig(Section):
    mode: Literal["sync"] = "sync"
    steps: Annotated[int, Field(ge=1)] = 100
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Prompts per step; with `rollout.n` sessions each."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens of one forward and backward; the result does not depend on it."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 50
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    eval_every: Annotated[int, Field(ge=0)] = 0
    """0 evaluates before the first and after the last step only."""
    eval_samples: Annotated[int, Field(ge=1)] | None = None
    """How many held-out problems; all of them when not set."""
    eval_teachers: bool = False
    """Also measure each teacher on the held-out problems it would judge, once, before the first step."""
    max_dead_letters: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of rows that may fail before the run stops."""


class DataPlaneConfig(Section):
    max_rows: Annotated[int, Field(ge=1)] = 100_000
    """Rows in flight at most; producers wait when it is full, nothing is dropped."""
    max_bytes: Annotated[int, Field(ge=1)] = 4 << 30
    """Of row data held in memory."""
    spill_bytes: Annotated[int, Field(ge=1)] = 1 << 20
    """Columns of this size or more live on disk."""


class ClusterConfig(Section):
    backend: Literal["local"] = "local"
    start_timeout_seconds: Annotated[float, Field(gt=0)] = 180.0
    """How long a child process may take until it is ready."""


class RunConfig(Section):
    dir: str | None = None
    """This run's folder; when not set, a fresh one is made under `runs/`."""
    name: str = "run"
    seed: Annotated[int, Field(ge=0)] = 0
    determinism: Literal["full", "fast"] | None = None
    """`full` composes every batch by key, so that a run repeats to the bit; `fast` batches by arrival. By default `full` on a
    CPU, `fast` on a GPU."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of the trainer; all cores when not set."""
