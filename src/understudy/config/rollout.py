"""`[rollout]`: how the student attempts its prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from understudy.config.base import Section, nearest
from understudy.config.devices import VisibleDevices

AGENTS = ("single_turn", "tool", "verifiers")
"""The agent loops that ship."""


class RolloutConfig(Section):
    engine: Literal["hf", "vllm", "sglang", "openai"] = "hf"
    """What generates: `hf` runs in this process; `vllm` are servers that the run starts and watches, or running ones at `urls`;
    `sglang` and `openai` (completions over token ids) are running servers."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Processes that hold the `hf` engine, each with a whole student; 0 keeps it inside the trainer. Results are the same. On a
    Ray cluster they may sit on other machines (`cluster.roles.rollout`)."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """vLLM servers to start; each holds the whole student. On a Ray cluster they may sit on other machines (`cluster.roles.rollout`)."""
    devices: list[VisibleDevices] = Field(default=[])
    """The GPUs of each vLLM server or engine process, as CUDA_VISIBLE_DEVICES wants them (`["1", "2,3"]`); empty leaves the choice to vLLM."""
    vllm_python: str | None = None
    """The interpreter of an environment that has vLLM; the variable UNDERSTUDY_VLLM_PYTHON when not set."""
    engine_args: list[str] = Field(default=[])
    """More words for vLLM's command line, for example `"--gpu-memory-utilization=0.4"`."""
    urls: list[str] = Field(default=[])
    """Running servers that hold the student; they must see this machine's file system (`snapshots`) to get new weights."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of the servers at `urls`."""
    served_model: str = "student"
    """What the servers at `urls` call the student."""
    snapshots: str | None = None
    """Folder through which servers get new weights; memory (/dev/shm) when not set, which only this machine sees."""
    live_weights: bool = True
    """Give every new version of the student to the servers. `false` rolls out with whatever they serve: off-policy."""
    agent: str = "single_turn"
    """A shipped agent loop, or `"module:Class"`. A row's `agent` column may choose another one that ships, or that `agent_options` names."""
    agent_options: dict[str, dict[str, Any]] = Field(default={})
    """`[rollout.agent_options.NAME]`: what the loop called NAME is made with, for example the tool loop's `tools`."""
    template_options: dict[str, Any] = Field(default={})
    """Handed to the chat template as they are (`enable_thinking = false`)."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that run agent loops; 0 runs them all in the trainer's. On other machines (`cluster.roles.workers`), with rows through
    TransferQueue, they also compute rewards, have rows judged and write them."""
    n: Annotated[int, Field(ge=1)] = 1
    """Sessions per prompt."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens of one turn at most."""
    max_trajectory_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens the student may write in all turns of a trajectory together; bounded by the context alone when not set."""
    context_length: Annotated[int, Field(ge=2)] | None = None
    """The longest sequence a rollout may be, prompt and all turns; what the student holds when not set. Engines keep room
    for it."""
    max_batch: Annotated[int, Field(ge=1)] = 128
    """Requests the engine decodes together."""
    kv_cache: Literal["model", "fp8"] = "model"
    """How the `hf` engine on a GPU keeps keys and values: in the student's precision, or in eight bits (a scale for every head and
    token), which nearly halves what a decode step reads and the memory. What writes the rollouts is then not quite the trained model:
    `loss.correction.measure` shows by how much. vLLM: `engine_args = ["--kv-cache-dtype=fp8"]`."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps every token."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1 makes tokens that were there before less likely."""
    stop: list[str] = Field(default=[])
    """Texts that end a turn, besides the model's own end-of-turn token."""
    deadline_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A rollout that takes longer becomes a dead letter."""
    group_failure: Literal["train_rest", "drop_group"] = "train_rest"
    """What becomes of a prompt's other sessions when one fails."""
    filter_groups: bool = False
    """Throw away prompts whose sessions all got the same reward (no advantage, nothing to learn) and take new ones instead."""
    max_refills: Annotated[int, Field(ge=0)] = 10
    """How often a step asks for new prompts in place of filtered ones; then it trains on what it has."""
    overlong: Literal["keep", "drop"] = "keep"
    """`drop`: responses cut off by `max_new_tokens` carry no loss; they were cut, not wrong."""
    overlong_buffer: Annotated[int, Field(ge=1)] | None = None
    """Over the last so many of `max_new_tokens` the reward falls in a straight line by `overlong_penalty`."""
    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0

    @property
    def starts_servers(self) -> bool:
        return self.engine == "vllm" and not self.urls

    @model_validator(mode="after")
    def _fits_its_engine(self) -> RolloutConfig:
        self._check_servers()
        if self.engine == "hf" and not self.live_weights:
            raise ValueError("live_weights = false belongs to servers; hf generates with the trained weights")
        if self.engine == "openai" and self.live_weights:
            raise ValueError(
                "engine = 'openai' cannot take new weights, so rollouts would not be the student's own; use 'vllm' or "
                "'sglang', or set live_weights = false to train off-policy on what the server serves"
            )
        for name in (self.agent, *self.agent_options):
            if name not in AGENTS and ":" not in name:
                guess = nearest(name, AGENTS)
                hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(AGENTS)}"
                raise ValueError(f"no agent loop is called {name!r}; {hint} (your own: 'module:Class')")
        if any(not text for text in self.stop):
            raise ValueError("`stop` holds an empty text, which would end every turn at once")
        return self

    def _check_servers(self) -> None:
        if self.engine in ("sglang", "openai") and not self.urls:
            raise ValueError(
                f"engine = {self.engine!r} needs `urls`, the addresses of running servers; only vLLM is started here"
            )
        if self.engine == "hf" and self.urls:
            raise ValueError(
                "`urls` belong to engine = 'vllm', 'sglang' or 'openai'; 'hf' runs in this process"
            )
        wrong = [url for url in self.urls if not url.startswith(("http://", "https://"))]
        if wrong:
            raise ValueError(f"`urls` has {wrong[0]!r}; expected an address like 'http://host:8000'")
        if self.processes and self.engine != "hf":
            raise ValueError(f"`processes` belong to engine = 'hf'; for {self.engine} servers set `replicas`")
        if not self.starts_servers:
            given = [
                key
                for key in _OF_OUR_SERVERS
                if getattr(self, key) != type(self).model_fields[key].default
                and not (key == "devices" and self.processes)
            ]
            if given:
                raise ValueError(
                    f"`{given[0]}` belongs to vLLM servers that the run starts (engine = 'vllm' without `urls`)"
                )
        wanted = self.processes or self.replicas
        if self.devices and len(self.devices) != wanted:
            kind = "processes" if self.processes else "replicas"
            raise ValueError(
                f"{len(self.devices)} devices for {wanted} {kind}; give one entry for each, or none"
            )


_OF_OUR_SERVERS = ("replicas", "devices", "vllm_python", "engine_args")
