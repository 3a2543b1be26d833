"""Engines, agent loops and machines of a verl configuration."""

from __future__ import annotations

from typing import Any

from understudy.porting.recipe_draft import Draft, Verdict
from understudy.porting.verl_schedule import VerlSchedule

_ROLLOUT = "actor_rollout_ref.rollout"
_VALUES = {
    "tensor_model_parallel_size": ("--tensor-parallel-size", 2, 1),
    "pipeline_model_parallel_size": ("--pipeline-parallel-size", 1, 1),
    "gpu_memory_utilization": ("--gpu-memory-utilization", 0.5, None),
    "max_num_batched_tokens": ("--max-num-batched-tokens", 8192, None),
    "quantization": ("--quantization", None, None),
}
"""Key → vLLM's flag, verl's default, vLLM's default where the flag is left out."""
_SGLANG_FLAGS = {"tensor_model_parallel_size": "--tp-size", "gpu_memory_utilization": "--mem-fraction-static"}
_SWITCHES = {
    "enforce_eager": ("--enforce-eager", True),
    "enable_chunked_prefill": ("--no-enable-chunked-prefill", False),
    "enable_prefix_caching": ("--no-enable-prefix-caching", False),
}
"""Key → vLLM's flag, and the value that asks for it."""


def machines(draft: Draft) -> int:
    """GPUs that train; also writes the machines if there are several."""
    each, nodes = draft.get("trainer.n_gpus_per_node", 8), draft.get("trainer.nnodes", 1)
    draft.put("trainer.ranks", each * nodes, "trainer.n_gpus_per_node", "trainer.nnodes")
    if nodes > 1:
        draft.put("cluster.backend", "ray", "trainer.nnodes")
        draft.put("cluster.pools.student.nodes", nodes, "trainer.nnodes")
        draft.put("cluster.pools.student.gpus_per_node", each, "trainer.n_gpus_per_node")
        draft.put("cluster.roles.student", "student", "trainer.nnodes")
        draft.notes.append(
            "several machines: `understudy train` runs on one of a Ray cluster (cluster.address = 'auto')"
        )
    return int(each * nodes)


def rollout(draft: Draft, gpus: int, schedule: VerlSchedule) -> None:
    for name, default in (("n", 1), ("temperature", 1.0), ("top_p", 1.0), ("repetition_penalty", 1.0)):
        value = draft.get(f"{_ROLLOUT}.{name}", default)
        draft.put(f"rollout.{name}", value if name == "n" else float(value), f"{_ROLLOUT}.{name}")
    if draft.get(f"{_ROLLOUT}.do_sample", True) is False:
        draft.put("rollout.temperature", 0.0, f"{_ROLLOUT}.do_sample")
    draft.not_needed(f"{_ROLLOUT}.do_sample", "rollouts are sampled")
    draft.put("rollout.top_k", max(draft.get(f"{_ROLLOUT}.top_k", -1), 0), f"{_ROLLOUT}.top_k")
    draft.put(
        "rollout.max_new_tokens", draft.get("data.max_response_length", 512), "data.max_response_length"
    )
    for ours, theirs in (
        ("context_length", "max_model_len"),
        ("max_batch", "max_num_seqs"),
        ("workers", "agent.num_workers"),
    ):
        if draft.get(f"{_ROLLOUT}.{theirs}") is not None:
            draft.put(f"rollout.{ours}", draft.get(f"{_ROLLOUT}.{theirs}"), f"{_ROLLOUT}.{theirs}")
    if schedule.own_engines:
        places = (
            ("rollout.n_gpus_per_node", "rollout.nnodes"),
            (f"{_ROLLOUT}.n_gpus_per_node", f"{_ROLLOUT}.nnodes"),
        )
        where = next((pair for pair in places if draft.get(pair[0]) is not None), places[0])
        gpus = draft.get(where[0], 8) * max(draft.get(where[1], 1), 1)
    else:
        where = ("trainer.n_gpus_per_node", "trainer.nnodes")
    _engine(draft, gpus, where, shared=not schedule.own_engines and draft.get("trainer.nnodes", 1) == 1)
    for key in where:
        draft.tell(key, Verdict.CARRIED, f"{gpus} GPUs that only write")
    _agent(draft)


def _engine(draft: Draft, gpus: int, where: tuple[str, str], shared: bool) -> None:
    """`where`: the keys that say how many GPUs write."""
    name = draft.get(f"{_ROLLOUT}.name", "vllm")
    if name != "vllm":
        _other_engine(draft, str(name))
        return
    draft.put("rollout.engine", "vllm", f"{_ROLLOUT}.name")
    each = draft.get(f"{_ROLLOUT}.tensor_model_parallel_size", 2)
    each *= draft.get(f"{_ROLLOUT}.pipeline_model_parallel_size", 1)
    replicas = max(gpus // each, 1)
    draft.put("rollout.replicas", replicas, *where)
    draft.vllm(replicas, each, shared)
    words, theirs = [], []
    for key, (flag, default, usual) in _VALUES.items():
        value = draft.get(f"{_ROLLOUT}.{key}", default)
        if value != usual:
            words.append(f"{flag}={value}")
            theirs.append(f"{_ROLLOUT}.{key}")
    for key, (flag, value) in _SWITCHES.items():
        if draft.get(f"{_ROLLOUT}.{key}") is value:
            words.append(flag)
            theirs.append(f"{_ROLLOUT}.{key}")
    own = f"{_ROLLOUT}.engine_kwargs.vllm."
    for key in [key for key in draft.given if key.startswith(own)]:
        flag, dot, part = key.removeprefix(own).partition(".")
        value = draft.get(key)
        if value not in (None, False, [], {}):  # verl leaves these out
            words += _words(f"--{flag.replace('_', '-')}{dot}{part}", value)
            theirs.append(key)
        draft.not_needed(key, "verl passes no flag for it")
    draft.put("rollout.engine_args", words, *theirs)
    for key in (*_VALUES, *_SWITCHES):
        draft.not_needed(f"{_ROLLOUT}.{key}", "it is vLLM's default")
    draft.not_needed(f"{_ROLLOUT}.data_parallel_size", "rollout.replicas counts servers")


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag] if value is True else [f"{flag}={value}"]


def _other_engine(draft: Draft, name: str) -> None:
    until = "until then rollout.engine = 'hf' writes the rollouts"
    if name == "sglang":
        draft.unsupported(f"{_ROLLOUT}.name", f"SGLang runs as servers that you start: rollout.engine = 'sglang' and rollout.urls; {until}")  # fmt: skip
    elif name == "hf":
        draft.tell(f"{_ROLLOUT}.name", Verdict.IMPLIED, "rollout.engine = 'hf'")
    else:
        draft.unsupported(
            f"{_ROLLOUT}.name",
            f"there is no engine {name}: rollout.engine = 'vllm' starts vLLM servers; {until}",
        )
    for key, flag in (*_SGLANG_FLAGS.items(), *((key, "") for key in (*_VALUES, *_SWITCHES))):
        where = (
            f"start the servers with {flag}={draft.get(f'{_ROLLOUT}.{key}')}"
            if flag
            else "a setting of the servers that you start"
        )
        draft.not_needed(f"{_ROLLOUT}.{key}", where if name == "sglang" else f"it belongs to {name}")
    for key in draft.given:
        if key.startswith(f"{_ROLLOUT}.engine_kwargs."):
            draft.not_needed(
                key,
                "a setting of the servers that you start"
                if f".{name}." in key
                else f"it does not belong to {name}",
            )


def _agent(draft: Draft) -> None:
    loop, turns = f"{_ROLLOUT}.agent.default_agent_loop", f"{_ROLLOUT}.multi_turn"
    named = draft.get(loop, "single_turn_agent")
    if draft.get(f"{turns}.enable", False) or named == "tool_agent":
        draft.put("rollout.agent", "tool", loop, f"{turns}.enable")
        draft.put(
            "rollout.agent_options.tool.format", draft.get(f"{turns}.format", "hermes"), f"{turns}.format"
        )
        if draft.get(f"{turns}.max_assistant_turns") is not None:
            key = f"{turns}.max_assistant_turns"
            draft.put("rollout.agent_options.tool.max_turns", draft.get(key), key)
        draft.put(
            "rollout.max_trajectory_tokens",
            draft.get("data.max_response_length", 512),
            "data.max_response_length",
        )
        for key in ("tool_config_path", "function_tool_path"):
            draft.unsupported(
                f"{turns}.{key}",
                '[rollout.agent_options.tool] tools = ["module:function"], or shipped tools by name',
            )
    elif named == "single_turn_agent":
        draft.tell(loop, Verdict.IMPLIED, "rollout.agent = 'single_turn'")
    else:
        draft.unsupported(loop, "rollout.agent = 'module:Class', a class with `run(prompt, context)`")
