"""`[rollout]`: what each engine needs and what it cannot do, reported before anything starts."""

import pytest

from understudy.config import parse_recipe
from understudy.config.rollout import AGENTS
from understudy.errors import ConfigError
from understudy.planning.preflight import PYTHON_VARIABLE, endpoints_of, vllm_python
from understudy.rollout.agents.registry import LOOPS

URL = ["http://127.0.0.1:1"]


def recipe(loss: dict | None = None, run: dict | None = None, **rollout: object) -> dict:
    return {
        "student": {"model": "s"},
        "teachers": {"t": {"model": "m"}},
        "data": {"train": "d.jsonl"},
        "loss": loss or {},
        "run": run or {},
        "rollout": rollout,
    }


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (recipe(engine="vlm"), "did you mean 'vllm'?"),
        (recipe(engine="sglang"), "needs `urls`, the addresses of running servers"),
        (recipe(engine="openai", urls=URL), "set live_weights = false to train off-policy"),
        (recipe(engine="sglang", urls=URL, min_p=0.1), "before `min_p`, so they are not of the distribution"),
        (recipe(engine="hf", urls=URL), "'hf' runs in this process"),
        (recipe(engine="hf", replicas=2), "`replicas` belongs to vLLM servers that the run starts"),
        (recipe(engine="vllm", urls=URL, engine_args=["-x"]), "`engine_args` belongs to vLLM servers"),
        (recipe(engine="vllm", urls=["127.0.0.1:1"]), "expected an address like 'http://host:8000'"),
        (recipe(engine="vllm", replicas=2, devices=["0"]), "1 devices for 2 replicas"),
        (recipe(engine="hf", live_weights=False), "belongs to servers"),
        (recipe(engine="vllm", run={"determinism": "full"}), "cannot repeat to the bit"),
        (recipe(agent="tol"), "did you mean 'tool'?"),
        (recipe(agent_options={"singleturn": {}}), "did you mean 'single_turn'?"),
        (recipe(stop=[""]), "would end every turn at once"),
        (recipe(max_trajectory_tokens=0), "`rollout.max_trajectory_tokens` = 0"),
        (
            recipe(engine="openai", urls=URL, live_weights=False, loss={"signal": "at_ids"}),
            "which rollout.engine = 'openai' does not report",
        ),
        (recipe(engine="vllm", top_p=0.9, loss={"signal": "at_ids"}), "leave rollout.top_p out"),
    ],
)
def test_each_invalid_rollout_setting_is_refused_with_its_explanation(table: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(table)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        recipe(engine="vllm", replicas=2, devices=["1", "2,3"], engine_args=["--gpu-memory-utilization=0.4"]),
        recipe(engine="vllm", urls=URL),
        recipe(engine="sglang", urls=URL, snapshots="/nfs/weights"),
        recipe(engine="openai", urls=URL, live_weights=False),
        recipe(engine="hf", top_p=0.9, loss={"signal": "at_ids", "kind": "reverse_kl"}),
        recipe(agent="my.package:Loop", agent_options={"my.package:Loop": {"depth": 2}}),
        recipe(agent="tool", agent_options={"tool": {"tools": ["calculator"], "max_turns": 3}}, workers=2),
    ],
)
def test_valid_rollout_settings_are_accepted_unchanged(table: dict) -> None:
    rollout = parse_recipe(table).rollout.model_dump()
    assert {key: rollout[key] for key in table["rollout"]} == table["rollout"]


def test_the_agent_loops_a_recipe_may_name_are_the_built_in_ones() -> None:
    assert set(AGENTS) == set(LOOPS)


def test_a_missing_vllm_interpreter_or_server_token_is_refused() -> None:
    rollout = parse_recipe(recipe(engine="vllm")).rollout
    with pytest.raises(ConfigError, match=r"set rollout\.vllm_python"):
        vllm_python(rollout, {})
    with pytest.raises(ConfigError, match="is not an interpreter"):
        vllm_python(rollout, {PYTHON_VARIABLE: "/no/such/python"})
    guarded = parse_recipe(recipe(engine="vllm", urls=URL, token_env="SOME_TOKEN")).rollout
    with pytest.raises(ConfigError, match="that environment variable is empty"):
        endpoints_of(guarded, {})
    (endpoint,) = endpoints_of(guarded, {"SOME_TOKEN": "secret"})
    assert endpoint.token == "secret" and "secret" not in repr(endpoint)
