"""`[trainer]`, `[dataplane]`, `[cluster]` and `[run]`: schedule, rows, machines, run directory."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from understudy.config.base import Section


class TrainerConfig(Section):
    """`[trainer]`: schedule, optimizer, checkpoints, evaluation."""

    mode: Literal["sync", "fully_async"] = "sync"
    """`sync` produces a batch, trains on it, publishes, and repeats; `fully_async` does all three at once."""
    max_staleness: Annotated[float, Field(ge=0)] = 1.0
    """`fully_async`: the largest number of publishes between the weights that wrote a row and the weights it
    trains. 0 is on-policy; a fraction f below 1 lets at most the share f of a window lag by
    one."""
    sync_every: Annotated[int, Field(ge=1)] = 1
    """`fully_async`: updates between two publishes."""
    partial_rollouts: bool = True
    """`fully_async`: running generations continue under new weights, and each token records its version;
    `false` lets a publish wait until they have ended."""
    adapt_admission: bool = False
    """`fully_async`: admit fewer prompts while finished rows pile up, and more again when the trainer waits."""
    stall_seconds: Annotated[float, Field(gt=0)] = 300.0
    """After this time without progress the run reports what each part waits for; `understudy doctor RUN`
    reports it at any time."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Number of steps of the run; or set `passes`."""
    passes: Annotated[float, Field(gt=0)] | None = None
    """Passes over the rows of `data.train`, in place of `steps`: passes · rows / `batch_size` steps, rounded
    up. Rows that `data.overlong` drops do not count, nor do the extra prompts that `rollout.filter_groups`
    draws. (`epochs` is something else.)"""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Prompts per step; with `rollout.n` sessions each."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling towards 0 at the end of the run."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Processes that train the student together (FSDP2), each on its own GPU, or all on the CPU; the run
    starts them. The number changes losses by rounding only."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens of one forward and backward pass; the result does not depend on it. If they do not fit into a GPU's
    memory, a run with one rank halves the number by itself (not under `run.determinism = "full"`)."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Number of times the student is trained on each batch."""
    mini_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Largest number of prompts of one optimizer step; by default the whole batch. It need not divide the batch size."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps both moments in one byte each: 6 bytes a parameter less."""
    offload_optimizer: bool = False
    """Keeps master weights and moments in host memory: 12 bytes a parameter less on the device, but slower
    steps."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keeps an exponential average of the weights, for `understudy export --averaged`."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 50
    """Steps between two checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """How many of the newest checkpoints are kept."""
    keep_best: bool = True
    """Checkpoint each step whose `val/accuracy` is the best so far, and keep it in addition (`understudy
    export RUN OUT --best`)."""
    async_save: bool = True
    """Write checkpoints during the next step, from a copy in host memory; `false` waits for the disk and needs
    no copy."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations; 0 evaluates only before the first and after the last step."""
    eval_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of held-out problems that are evaluated; by default all."""
    eval_k: Annotated[int, Field(ge=0)] = 0
    """Samples per held-out problem, at the rollout's temperature, in addition to the greedy answer, for
    `val/avg@k` and `val/pass@1` … `val/pass@k`. 0 takes none."""
    solved_at: float = 1.0
    """A sample whose reward reaches this counts as solved in `pass@k`, and as `session.solution` in a teacher's prompt."""
    eval_teachers: bool = False
    """Also evaluate each teacher once, before the first step, on the held-out problems of its data."""
    max_dead_letters: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of rows that may fail before the run stops."""

    def steps_over(self, rows: int) -> int:
        """Rounded up: every row is used at least `passes` times, and the last batch may reach into the next
        pass."""
        if self.passes is None:
            return self.steps
        return max(math.ceil(round(self.passes * rows / self.batch_size, 6)), 1)

    def length_note(self, rows: int) -> str | None:
        """How many steps `passes` are; None if the recipe names steps."""
        if self.passes is None:
            return None
        steps = self.steps_over(rows)
        counted = f"{steps} step{'' if steps == 1 else 's'}"
        return f"trainer.passes = {self.passes:g} over {rows} rows in batches of {self.batch_size}: {counted}"

    @model_validator(mode="after")
    def _one_length(self) -> TrainerConfig:
        if self.passes is not None and "steps" in self.model_fields_set:
            raise ValueError("both `steps` and `passes` are given; keep one: steps, or passes over the data")
        return self


class DataPlaneConfig(Section):
    """`[dataplane]`: where rows are kept between production and training."""

    backend: Literal["embedded", "transfer_queue"] = "embedded"
    """Where rows are kept between production and training: in the trainer's process, or in the memory of a
    Ray cluster (TransferQueue). Either way they are in the run directory too."""
    storage_units: Annotated[int, Field(ge=1)] = 2
    """`transfer_queue`: processes that hold rows, spread over the machines; each takes a CPU, and so does
    their controller."""
    max_rows: Annotated[int, Field(ge=1)] = 100_000
    """Largest number of rows in flight, with `rollout.n` for each prompt. When it is reached, producers wait;
    nothing is dropped. It must hold a window (`batch_size` · `n` · `sync_every`); what it holds beyond that
    limits how far ahead a fully async run may be."""
    max_bytes: Annotated[int, Field(ge=1)] = 4 << 30
    """Largest number of bytes of row data held in memory."""
    spill_bytes: Annotated[int, Field(ge=1)] | None = None
    """Columns of this size or more are only on disk. By default 1 MiB with `embedded`; `transfer_queue` sends
    all columns through its memory."""
    queue_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """`transfer_queue`: how long an upload of rows, or a rank's fetch, may take before the queue counts as
    lost and rows are read from the run directory."""


class PoolConfig(Section):
    """`[cluster.pools.NAME]`: machines on which roles and teachers are placed."""

    nodes: Annotated[int, Field(ge=1)] = 1
    """Machines of the pool."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs of each machine."""
    cpus_per_node: Annotated[int, Field(ge=0)] = 0
    """CPU cores of each machine."""

    @model_validator(mode="after")
    def _not_empty(self) -> PoolConfig:
        if not self.gpus_per_node and not self.cpus_per_node:
            raise ValueError("an empty pool: set `gpus_per_node` or `cpus_per_node`")
        return self


class RestartsConfig(Section):
    """`[cluster.restarts]`: how often a lost process is restarted, by role."""

    student: Annotated[int, Field(ge=0)] = 1
    """A rank of the student, or the critic's process (`critic.process`): the run goes back to its last
    checkpoint, in the same trainer process, on the machines that are left. The count starts again after each
    checkpoint; 0 ends the run with the lost process's last output."""
    rollout: Annotated[int, Field(ge=0)] = 5
    """An engine process (`rollout.processes`): restarts in a row without having served for a minute, with
    growing waits between them. Then the process is given up; if none is left, the run ends with its last
    output. The same applies to a vLLM server that the run started: restarts in a row without an answer."""
    workers: Annotated[int, Field(ge=0)] = 10
    """An agent-loop worker (`rollout.workers`): restarts in a row without a finished session. Then it is given
    up; if none is left, the run ends with the reason."""
    teacher: Annotated[int, Field(ge=0)] = 20
    """A replica of a teacher, counted and given up in the same way. Rows wait in the meantime, so it is retried
    for longer: 20 restarts are eight minutes of waiting, not counting the starts themselves."""


class ClusterConfig(Section):
    """`[cluster]`: the machines and where processes run on them."""

    backend: Literal["local", "ray"] = "local"
    """`local` starts processes on this machine, `ray` also on the other machines of a Ray cluster (`pip
    install understudy[ray]`)."""
    address: str | None = None
    """`ray`: HOST:PORT of the cluster, or `auto` on one of its machines; by default the run starts its own Ray
    on this machine."""
    ray_auth: Literal["token", "off"] = "token"
    """`off` uses a cluster that was started without authentication: anyone who can connect to it can run
    anything on it."""
    start_timeout_seconds: Annotated[float, Field(gt=0)] = 180.0
    """How long a child process may take to become ready, and a server at `urls` to answer when the run starts."""
    pools: dict[str, PoolConfig] = Field(default={})
    """Named parts of the machines. A teacher names its pool with `pool`; `cluster.roles` assigns pools to other
    roles."""
    roles: dict[Literal["student", "rollout", "workers", "critic"], str] = Field(default={})
    """Role → pool. The backend places a role without a pool. A reference, and a critic without a pool or its own
    process (`critic.process`), run with the student's leading rank."""
    restarts: RestartsConfig = RestartsConfig()


class RunConfig(Section):
    """`[run]`: the run directory, loggers, seed and determinism."""

    dir: str | None = None
    """The run directory; by default a new folder under `runs/`."""
    name: str = "run"
    """First part of the name of the new folder under `runs/`; report and loggers show that name."""
    note: str | None = None
    """A sentence shown in the report and the terminal, for example how to read the answers."""
    loggers: list[Literal["tensorboard", "wandb", "trackio", "mlflow", "opentelemetry"]] = Field(default=[])
    """Loggers besides the console and metrics.jsonl; each is an extra (`pip install understudy[wandb]`).
    `trackio` also gets kept rows as traces; `opentelemetry` gets the spans."""
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = 0
    """Seed of the order of rows, of sampling and of new weights."""
    determinism: Literal["full", "fast"] | None = None
    """`full` composes every batch by key, so that a run repeats to the bit; `fast` batches by arrival. By
    default `full` on a CPU, `fast` on a GPU."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of the trainer; all cores when not set."""
    mps: Literal["auto", "off"] = "auto"
    """`auto` starts NVIDIA's multi-process service if processes of a fully async run share a GPU and
    `nvidia-cuda-mps-control` is on PATH, and ends it with the process that trains. It uses a service that is
    already running. `off` does not use the service. See "On one GPU" in docs/async.md."""
    rollout_dump_every: Annotated[int, Field(ge=0)] = 0
    """Write the rows of every N-th step as text to `rollouts/STEP.jsonl` in the run directory; 0: never."""
    profile_steps: list[Annotated[int, Field(ge=1)]] = Field(default=[])
    """Steps for which the trainer's process writes a trace of all operators and kernels to
    `profile/STEP.json.gz` in the run directory. These steps are slower. ui.perfetto.dev opens the files."""
    keep_rows: Annotated[int, Field(ge=0)] = 32 << 20
    """Bytes of trained rows that are kept with all their token columns for `understudy view`: a sample of every
    step, and the rows with the largest KL. 0 keeps none. Rows on `transfer_queue` are not kept."""
    python_path: list[str] = Field(default=[])
    """Folders in which the modules of `module:object` names (rewards, agent loops, tools) are searched, after
    Python's own path; relative to the recipe. By default the recipe's own folder."""
