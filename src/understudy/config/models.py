"""`[student]` and `[teachers.NAME]`: the models of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from understudy.config.base import Section
from understudy.config.devices import Device

DType = Literal["float32", "bfloat16", "float16"]
Attention = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"]
"""Which of transformers' attention implementations computes a model. `auto`: `sdpa`, over packed rows if the
model supports that, and `eager` if the model has no `sdpa` (soft caps, attention sinks). A name: that one,
over padded rows."""
_PLACEMENTS = ("standalone", "pool", "external", "trainer", "engine")
OF_BASES = ("trainer", "engine")
"""Placements of a teacher that is the base of a LoRA student and has no processes of its own."""


def _named(model: str) -> str:
    if not model.strip():
        raise ValueError("expected a hub id or the folder of a model")
    return model


Model = Annotated[str, AfterValidator(_named)]


class LoraConfig(Section):
    """`[student.lora]`: train small adapters and freeze the model's own weights (needs the `lora` extra)."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Inner dimension of an adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapters' product is scaled by alpha / rank."""
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Linear layers that get an adapter, by the last part of their names."""
    publish: Literal["merged", "adapter"] = "merged"
    """What engine processes (`rollout.processes`) get after an update: all weights, or only the adapters,
    which they merge into the weights they loaded. `adapter` sends little data, but each engine keeps the
    adapted layers twice."""


class StudentConfig(Section):
    """`[student]`: the model that is trained."""

    model: Model
    """Hub id or folder of the student."""
    revision: str | None = None
    """Pinned hub revision; needed for a hub id when `trust_remote_code` is on."""
    trust_remote_code: bool = False
    """Run the modeling code that comes with the model (`auto_map` in its config.json)."""
    attention: Attention = "auto"
    """Attention implementation for training, and for generation with `rollout.engine = "hf"`."""
    dtype: DType = "float32"
    """Dtype of the weights in forward and backward; master weights stay float32."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`. With `trainer.ranks` above 1, `cuda:N` puts all ranks on that GPU, where they
    exchange tensors through host memory: this serves to try a layout on one GPU and is slow."""
    freeze_vision: bool = True
    """For a vision-language student: train only its language part; `false` trains the vision part too."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the decoder layers for training: faster on GPUs, about a minute at start; needs a C++ compiler
    on a CPU."""
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _pinned_code(self) -> StudentConfig:
        _check_code_is_pinned(self.model, self.trust_remote_code, self.revision)
        return self


class TeacherConfig(Section):
    """`[teachers.NAME]`: a frozen model that scores the rollouts, and the processes that hold it."""

    model: Model
    """Hub id or folder of the teacher; for an external vLLM or OpenAI-compatible server, the model it
    serves. `student`: the student itself, in the version that `version` names."""
    version: Literal["start", "live", "ema"] | Annotated[int, Field(ge=1)] | None = None
    """With `model = "student"`: which weights score. `start`: those at the start of the run (default); `live`: those
    last published; `ema`: their running average (`trainer.ema_decay`); N: those of N publishes before the last."""
    revision: str | None = None
    """Pinned hub revision; needed for a hub id when `trust_remote_code` is on."""
    trust_remote_code: bool = False
    """Run the modeling code that comes with the model (`auto_map` in its config.json)."""
    attention: Attention = "auto"
    """Attention implementation for scoring, in processes that this run starts."""
    vocabulary: Literal["equal", "align"] = "equal"
    """`equal`: the teacher has the student's token ids, which is checked. `align`: it may have another tokenizer.
    The bytes of a completion are then tokenized again, and the teacher uses its own chat template."""
    prompt: str | list[dict[str, str]] | None = None
    """What this teacher reads in place of the student's prompt: a Jinja template over the row's columns. A text
    replaces a plain prompt, or the last user message of a chat. A list of `{role, content}`, each content a
    template, replaces the whole chat. By default the teacher reads the student's prompt."""
    prompt_column: str | None = None
    """Column of the row with such a prompt: text or messages."""
    key: str | None = None
    """Value of the routing column whose rows this teacher scores; a single teacher needs no key."""
    replicas: Annotated[int, Field(ge=0)] = 1
    """Number of server processes that hold this teacher."""
    placement: Annotated[str, WithJsonSchema({"type": "string", "enum": [*_PLACEMENTS]})] = "standalone"
    """`pool` (part of a named pool), `standalone` (own processes and devices) or `external` (`urls`). The frozen base of
    a LoRA student needs no copy: `trainer` scores in the trainer's process, `engine` in every engine process
    (`rollout.processes`)."""
    pool: str | None = None
    """Name of the `[cluster.pools]` entry whose machines the replicas use (`placement = "pool"` only)."""
    urls: list[str] = Field(default=[])
    """Addresses of running scoring servers (`placement = "external"` only)."""
    backend: Literal["auto", "native", "vllm", "sglang", "openai"] = "auto"
    """Kind of server at `urls`; `auto` detects it. Set it if a gateway answers every path alike. Without `urls`, `vllm`
    means vLLM servers that the run starts and watches, and `auto` and `native` mean our own replicas."""
    vllm_python: str | None = None
    """The Python interpreter of an environment that has vLLM (`backend = "vllm"` without `urls`); by default the
    environment variable UNDERSTUDY_VLLM_PYTHON."""
    engine_args: list[str] = Field(default=[])
    """Further arguments of the command line of such vLLM servers, for example
    `"--gpu-memory-utilization=0.4"`."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of external servers."""
    dtype: DType = "float32"
    """Dtype of the weights in replicas that this run starts."""
    quantize: Literal["int8", "fp8"] | None = None
    """Keeps the replicas' weights in eight bits. `fp8` uses float8 weights and products in the layers (GPUs from compute
    capability 8.9 on), with head and embedding in int8. A replica measures the change at its start."""
    quantize_tolerance: Annotated[float, Field(gt=0)] = 0.05
    """Largest mean KL, in nats, by which `quantize` may change the scores of the fixed tokens; a replica above it
    is refused."""
    offload: Literal["all"] | Annotated[int, Field(ge=0)] = 0
    """Number of a replica's last decoder layers (or `all`) that stay in host memory and are copied to the GPU for every
    forward. For a teacher that does not fit; scores are the same to the bit. No effect on a CPU."""
    device: Device = "auto"
    """`auto` (its own GPU if there are several), `cpu`, `cuda` or `cuda:N` (that GPU, even if other processes use
    it)."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of processes, each with its device, over which one replica's model is sharded."""
    compile: bool = False
    """Compile the decoder layers: faster on GPUs, some seconds at start."""
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of one replica."""
    ports: list[int] = Field(default=[])
    """Fixed loopback ports, one per replica; empty lets the system choose."""
    max_batch_tokens: Annotated[int, Field(ge=1)] = 16384
    """Tokens of one forward pass of a replica."""
    deadline_seconds: Annotated[float, Field(gt=0)] = 60.0
    """After this time without a reply a request is retried on another replica."""
    outage_seconds: Annotated[float, Field(gt=0)] = 600.0
    """`external` only: after this time without an answer from any of `urls` the run ends, and can be resumed.
    Rows wait in the meantime."""
    hedge_after_seconds: Annotated[float, Field(gt=0)] | None = None
    """After this time a second replica is asked as well, and the first reply wins; by default never."""
    cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of scores to keep in memory for repeated requests; 0 keeps none."""
    context_length: Annotated[int, Field(ge=2)] | None = None
    """Largest number of tokens of one sequence, prompt + response + 1; by default the model's own limit."""

    @field_validator("placement")
    @classmethod
    def _known_placement(cls, placement: str) -> str:
        if placement == "colocate":
            raise ValueError(
                "refused: a teacher that shares the student's memory by taking turns is slept and woken every step, and "
                "woke up with wrong weights in other systems; use 'standalone', 'pool' or 'external' (or 'trainer' or 'engine': the base "
                "of a LoRA student, which shares tensors that never change)"
            )
        if placement not in _PLACEMENTS:
            raise ValueError("expected 'pool', 'standalone', 'external', 'trainer' or 'engine'")
        return placement

    @model_validator(mode="after")
    def _placed(self) -> TeacherConfig:
        if self.placement == "external":
            self._check_external()
        else:
            self._check_own()
        if self.placement == "pool" and not self.pool:
            raise ValueError("placement = 'pool' needs `pool`, the name of one of [cluster.pools]")
        if self.placement != "pool" and self.pool:
            raise ValueError(f"`pool` = {self.pool!r} belongs to placement = 'pool'")
        _check_code_is_pinned(self.model, self.trust_remote_code, self.revision)
        return self

    @model_validator(mode="after")
    def _one_prompt(self) -> TeacherConfig:
        if self.prompt is not None and self.prompt_column is not None:
            raise ValueError("`prompt` and `prompt_column` are both set; keep one")
        if self.prompt in ("", []) or self.prompt_column == "":
            raise ValueError("an empty `prompt`; leave it out, and the teacher reads the student's")
        for message in self.prompt if isinstance(self.prompt, list) else ():
            if message.keys() != {"role", "content"}:
                raise ValueError(
                    f"`prompt` has a message with the keys {', '.join(message) or 'none'}; expected role and content"
                )
        return self

    @property
    def follows_student(self) -> bool:
        """Whether its replicas take new weights while the run goes on."""
        return self.version is not None and self.version != "start"

    @property
    def starts_vllm(self) -> bool:
        """Whether its replicas are vLLM servers that the run starts."""
        return self.backend == "vllm" and self.placement != "external"

    @property
    def reads_own_prompt(self) -> bool:
        return self.prompt is not None or self.prompt_column is not None

    def _check_external(self) -> None:
        if not self.urls:
            raise ValueError("placement = 'external' needs `urls`, the addresses of running scoring servers")
        wrong = [url for url in self.urls if not url.startswith(("http://", "https://"))]
        if wrong:
            raise ValueError(f"`urls` has {wrong[0]!r}; expected an address like 'http://host:8000'")
        fields = type(self).model_fields
        ours = [key for key in _OF_OUR_PROCESSES if getattr(self, key) != fields[key].default]
        if ours:
            usual = ", ".join(f"{key} = {fields[key].default!r}" for key in ours)
            raise ValueError(
                f"`{'`, `'.join(ours)}` {'belongs' if len(ours) == 1 else 'belong'} to processes that this run starts; an "
                f"external server was started with its own; leave {'it' if len(ours) == 1 else 'them'} out ({usual})"
            )

    def _check_own(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas = {self.replicas}: a teacher needs at least 1 replica")
        if self.urls:
            raise ValueError("`urls` belong to placement = 'external'")
        if self.token_env:
            raise ValueError(
                "`token_env` belongs to placement = 'external': replicas that this run starts get the run's own token"
            )
        if "outage_seconds" in self.model_fields_set and self.outage_seconds != 600.0:
            raise ValueError(
                "`outage_seconds` belongs to placement = 'external': replicas that this run starts are restarted "
                "cluster.restarts.teacher times"
            )
        if self.backend in ("sglang", "openai"):
            raise ValueError(
                f"backend = {self.backend!r} belongs to placement = 'external': replicas started here are 'native' or 'vllm'"
            )
        if self.starts_vllm:
            self._check_vllm()
        elif self.vllm_python is not None or self.engine_args:
            raise ValueError(
                f"`{'engine_args' if self.engine_args else 'vllm_python'}` belongs to vLLM servers that the run starts "
                "(backend = 'vllm' without `urls`)"
            )
        shared = [
            (f"tensor_parallel = {self.tensor_parallel}", self.tensor_parallel > 1),
            (f"placement = {self.placement!r}", self.placement in OF_BASES),
        ]
        if self.offload and (
            against := _holding(
                *shared,
                (f"quantize = {self.quantize!r}", self.quantize is not None),
                ("compile = true", self.compile),
                ("device = 'cpu'", self.device == "cpu"),
            )
        ):
            raise ValueError(
                f"offload = {self.offload!r} keeps whole layers of a replica of one process in host memory and copies them to "
                f"its GPU, and {against} is set; leave one of the two out"
            )
        if self.quantize is not None and (
            against := _holding(*shared, (f"version = {self.version!r}", self.follows_student))
        ):
            raise ValueError(
                f"quantize = {self.quantize!r} is for replicas of one process that load a model of their own, and "
                f"{against} is set; leave one of the two out"
            )
        self._check_seats()

    def _check_vllm(self) -> None:
        fields = type(self).model_fields
        ours = [key for key in _OF_NATIVE_REPLICAS if getattr(self, key) != fields[key].default]
        if ours:
            raise ValueError(
                f"`{ours[0]}` = {getattr(self, ours[0])!r} belongs to native replicas, and backend = 'vllm' is set; leave it out, or give "
                "vLLM an argument of its own (engine_args)"
            )
        if self.placement in OF_BASES:
            raise ValueError(
                "backend = 'vllm' has processes of its own; use placement = 'standalone' or 'pool'"
            )
        if self.follows_student:
            raise ValueError(
                f"version = {self.version!r} with backend = 'vllm': vLLM servers that score keep the weights they load; leave `backend` "
                "out, or set version = 'start'"
            )
        parallel = [
            word for word in self.engine_args if word.split("=")[0] in ("--tensor-parallel-size", "-tp")
        ]
        if parallel:
            raise ValueError(
                f"`engine_args` has {parallel[0]!r}; set `tensor_parallel`, by which GPUs are assigned"
            )

    def _check_seats(self) -> None:
        if self.ports and len(self.ports) != self.replicas:
            raise ValueError(
                f"{len(self.ports)} ports for {self.replicas} replicas; give one per replica, or none"
            )
        if self.placement == "pool" and self.device.startswith("cuda:"):
            raise ValueError(
                f"device = {self.device!r}: a replica of a pool is seated by it; leave `device` out"
            )
        if self.tensor_parallel > 1 and self.device.startswith("cuda:"):
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} needs that many devices, device = {self.device!r} is one; "
                "leave `device` out, or set 'cuda'"
            )


_OF_OUR_PROCESSES = (
    "replicas", "ports", "tensor_parallel", "threads", "device", "dtype", "max_batch_tokens", "compile", "revision",
    "trust_remote_code", "attention", "quantize", "quantize_tolerance", "vllm_python", "engine_args",
    "offload",
)  # fmt: skip
_OF_NATIVE_REPLICAS = ("compile", "attention", "quantize", "quantize_tolerance", "offload", "ports")


def _holding(*settings: tuple[str, bool]) -> str:
    """Those of the settings that are made."""
    return " and ".join(text for text, holds in settings if holds)


def _check_code_is_pinned(model: str, trusted: bool, revision: str | None) -> None:
    """Code in a folder changes only when its owner changes it; code on the hub may change between two
    downloads."""
    if trusted and not revision and not (Path(model).is_absolute() or Path(model).is_dir()):
        raise ValueError(
            f"trust_remote_code = true runs code from the hub, and {model!r} is not a folder on this machine: pin it with `revision`"
        )
