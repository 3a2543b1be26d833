"""`[rollout]`: how the student generates."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from understudy.config.base import Section, nearest
from understudy.config.devices import VisibleDevices

_LEAST_TEMPERATURE = 1e-6
AGENTS = ("single_turn", "tool", "verifiers", "verifiers_v1", "openenv")
"""The built-in agent loops."""


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(f"{text!r} is not a date; expected one like '2026-11-19'") from None


class RolloutConfig(Section):
    """`[rollout]`: how the student generates."""

    engine: Literal["hf", "vllm", "sglang", "openai"] = "hf"
    """What generates the tokens: `hf` in the trainer's process (or in `processes`); `vllm` with servers that the
    run starts and watches, or with running ones at `urls`; `sglang` and `openai` (completions over token ids)
    with running servers."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Separate processes for the `hf` engine, each with a whole student; 0 runs it in the trainer's process.
    Results are the same. On a Ray cluster they may run on other machines (`cluster.roles.rollout`)."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """vLLM servers to start; each holds the whole student. On a Ray cluster they may run on other machines
    (`cluster.roles.rollout`)."""
    devices: list[VisibleDevices] = Field(default=[])
    """The GPUs of each vLLM server or engine process, written as in CUDA_VISIBLE_DEVICES (`["1", "2,3"]`);
    an engine process takes one. By default they are assigned automatically."""
    vllm_python: str | None = None
    """The Python interpreter of an environment that has vLLM; by default the environment variable
    UNDERSTUDY_VLLM_PYTHON."""
    engine_args: list[str] = Field(default=[])
    """Further arguments of vLLM's command line, for example `"--gpu-memory-utilization=0.4"`."""
    urls: list[str] = Field(default=[])
    """Addresses of running servers that hold the student. To get new weights they must see this machine's file
    system (`snapshots`)."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of the servers at `urls`."""
    served_model: str = "student"
    """The student's model name on the servers at `urls`."""
    snapshots: str | None = None
    """Folder through which servers get new weights; by default shared memory (/dev/shm), which only this
    machine sees."""
    live_weights: bool = True
    """Send every new version of the student to the servers. With `false` they generate with the weights they
    already have, which is off-policy."""
    agent: str = "single_turn"
    """A built-in agent loop, or `"module:Class"`. A row's `agent` column may choose another built-in one, or
    one that `agent_options` names."""
    agent_options: dict[str, dict[str, Any]] = Field(default={})
    """`[rollout.agent_options.NAME]`: constructor arguments of the loop NAME, for example the tool loop's
    `tools`."""
    template_options: dict[str, Any] = Field(default={})
    """Passed to the chat template unchanged (`enable_thinking = false`). `chat_template` chooses the template itself: the
    name of one of the tokenizer's, or a template's text."""
    template_date: Annotated[str, AfterValidator(_day)] | None = None
    """The day that chat templates see as today (`strftime_now`), for example `"2026-11-19"`; by default the day on
    which the run began, also after a resume."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that run agent loops; 0 runs all loops in the trainer's process. On other machines
    (`cluster.roles.workers`), with rows through TransferQueue, these processes also compute rewards, have rows
    scored and write them."""
    n: Annotated[int, Field(ge=1)] = 1
    """Sessions (attempts) per prompt."""
    off_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the sessions that take their answer from the row (`answer_column`) instead of the student; teachers
    score it in the same way. This is 1 − GKD's λ. See "Given answers" in docs/losses.md."""
    answer_column: str = "answer"
    """The column with the answers of `off_policy`: text, or a list with one assistant message; a demonstration, what
    a teacher wrote, or TRL's `completion`."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Largest number of tokens that the student writes in one turn."""
    max_trajectory_tokens: Annotated[int, Field(ge=1)] | None = None
    """Largest number of tokens that the student writes in all turns of a trajectory together; by default
    limited only by the context."""
    context_length: Annotated[int, Field(ge=2)] | None = None
    """Largest number of tokens of a rollout, prompt and all turns together; by default the student's own limit.
    Engines reserve memory for it. If it is not set and rows have one turn, the `hf` engine on a GPU reserves
    memory for the longest prompt and its answer."""
    max_batch: Annotated[int, Field(ge=1)] = 128
    """Largest number of requests that the engine decodes together."""
    kv_cache: Literal["model", "fp8"] = "model"
    """How the `hf` engine on a GPU stores keys and values: in the student's precision, or in eight bits (a
    scale for every head and token), which nearly halves the memory and what a decode step reads. The model
    that writes the rollouts then differs slightly from the trained one: `loss.correction.measure` shows by
    how much. vLLM: `engine_args = ["--kv-cache-dtype=fp8"]`."""
    recompute_kv: bool = True
    """After each publish of a fully async run with `trainer.partial_rollouts`, the `hf` engine recomputes the keys and
    values of running generations with the new weights. `false` keeps them and saves that time; later tokens are then
    drawn from the new weights over keys and values of earlier ones. Recorded log-probabilities are those with which
    tokens were drawn, so ratios to the trained student stay right."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Temperature of sampling; 0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens that has this probability mass; 1 keeps every token."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many of the most likely tokens; 0 keeps every token."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens that are less likely than this factor times the most likely one; 0 keeps every token."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1 makes tokens that occurred before less likely."""
    stop: list[str] = Field(default=[])
    """Strings that end a turn, besides the model's own end-of-turn token."""
    deadline_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A rollout that takes longer becomes a dead letter."""
    group_failure: Literal["train_rest", "drop_group"] = "train_rest"
    """What happens to a prompt's other sessions when one fails."""
    filter_groups: bool = False
    """Drop prompts whose sessions all got the same reward (no advantage, nothing to learn) and draw new ones
    instead."""
    max_refills: Annotated[int, Field(ge=0)] = 10
    """How many times a step may draw new prompts for filtered ones; after that it trains on the rows it has."""
    overlong: Literal["keep", "drop"] = "keep"
    """With `drop`, responses that `max_new_tokens` cut off carry no loss, because they are incomplete, not wrong."""
    overlong_buffer: Annotated[int, Field(ge=1)] | None = None
    """Over this many last tokens of `max_new_tokens` the reward falls linearly by `overlong_penalty`; for
    trajectories of several turns, of `max_trajectory_tokens`."""
    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Subtracted from the reward of a response of full length (`overlong_buffer`)."""

    @property
    def for_templates(self) -> dict[str, Any]:
        """What a `Renderer` takes: the options, and the day that templates see as today's."""
        day = {"strftime_now": self.template_date} if self.template_date else {}
        return {**day, **self.template_options}

    @property
    def for_other_tokenizers(self) -> dict[str, Any]:
        """The same for a teacher with another tokenizer, which reads prompts by its own chat template."""
        return {name: one for name, one in self.for_templates.items() if name != "chat_template"}

    @property
    def trajectory_budget(self) -> int | None:
        """Most tokens that the student writes in a trajectory; None: as many as its context holds."""
        if self.agent == "single_turn":
            return min(self.max_new_tokens, self.max_trajectory_tokens or self.max_new_tokens)
        return self.max_trajectory_tokens

    @property
    def starts_servers(self) -> bool:
        return self.engine == "vllm" and not self.urls

    @model_validator(mode="after")
    def _fits_its_engine(self) -> RolloutConfig:
        self._check_servers()
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature = {self.temperature:g} makes logits overflow; write 0, which takes the most likely token, or at least "
                f"{_LEAST_TEMPERATURE:g}"
            )
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
        cut = next((key for key in _CUTS if getattr(self, key) != type(self).model_fields[key].default), None)
        if self.engine == "sglang" and cut is not None:
            raise ValueError(
                f"engine = 'sglang' reports log-probabilities before `{cut}`, so they are not of the distribution sampled "
                f"from; leave `{cut}` out, or use 'hf' or 'vllm'"
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
        several = next((one for one in self.devices if self.processes and "," in one), None)
        if several is not None:
            raise ValueError(
                f"`devices` has {several!r} for an engine process, which computes on one GPU; name one for each, and set "
                "`processes` to their number"
            )
        wanted = self.processes or self.replicas
        if self.devices and len(self.devices) != wanted:
            kind = "processes" if self.processes else "replicas"
            raise ValueError(
                f"{len(self.devices)} devices for {wanted} {kind}; give one entry for each, or none"
            )


_CUTS = ("top_p", "top_k", "min_p")
_OF_OUR_SERVERS = ("replicas", "devices", "vllm_python", "engine_args")
