"""A key that is set and cannot have an effect is refused with what would give it one; defaults are never refused."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from understudy.config import Recipe, load_recipe, parse_recipe
from understudy.config.recipe import apply_overrides
from understudy.errors import ConfigError, UnderstudyError
from understudy.observability.redact import redact

ROOT = Path(__file__).parents[3]
SHIPPED = sorted([*ROOT.glob("recipes/**/*.toml"), *ROOT.glob("src/understudy/assets/**/*.toml")])
URL = '["http://h:1"]'


def recipe(*arguments: str) -> Recipe:
    table: dict[str, Any] = {
        "student": {"model": "s"},
        "teachers": {"t": {"model": "t"}},
        "data": {"train": "d"},
    }
    apply_overrides(table, arguments)
    return parse_recipe(table)


REWARDED = ("loss.task_coef=1.0", "data.reward=m:f", "rollout.n=2")
SERVERS = ("rollout.engine=sglang", f"rollout.urls={URL}")
RAY = ("cluster.backend=ray",)
CASES = [
    ("loss.beta=0.9", ["loss.kind=jsd"], "needs loss.kind = 'jsd'"),
    ("loss.alpha=0.3", ["loss.kind=skew_reverse_kl"], "'skew_forward_kl' or"),
    ("loss.mixture_weight=0.3", ["loss.kind=mixture"], "needs loss.kind = 'mixture'"),
    ("loss.clip_low=0.1", REWARDED, "needs a policy gradient"),
    ("loss.clip_high=0.1", ["loss.kind=k1", "loss.signal=sampled", "loss.policy_gradient=true"], "a policy gradient"),
    ("loss.dual_clip=3.0", REWARDED, "loss.task_coef above 0, or loss.policy_gradient = true"),
    ("loss.tis_cap=2.0", REWARDED, "needs a policy gradient"),
    ("loss.gamma=0.9", [*REWARDED, "loss.advantage=reinforce++"], "'reinforce\\+\\+' or 'gae'"),
    ("loss.lam=0.9", [*REWARDED, "loss.advantage=gae"], "loss.advantage = 'gae'"),
    ("loss.correction.cap=3.0", [*REWARDED, "loss.correction.weigh=token"], "loss.correction.weigh = "),
    ("loss.correction.low=0.1", [*REWARDED, "loss.correction.drop=token"], "loss.correction.drop = "),
    ("loss.correction.high=3.0", [*REWARDED, "loss.correction.drop=token"], "loss.correction.drop = "),
    ("rollout.token_env=T", SERVERS, "running servers: rollout.urls"),
    ("rollout.served_model=qwen", SERVERS, "running servers: rollout.urls"),
    ("rollout.snapshots=/nfs", SERVERS, "servers that get new weights"),
    ("rollout.max_refills=3", [*REWARDED, "rollout.filter_groups=true"], "rollout.filter_groups = true"),
    ("rollout.overlong_penalty=2.0", [*REWARDED, "rollout.overlong_buffer=8"], "rollout.overlong_buffer, the"),
    ("trainer.eval_every=5", ["data.eval=e", "data.reward=m:f"], "both data.eval and data.reward"),
    ("trainer.eval_samples=5", ["data.eval=e", "data.reward=m:f"], "both data.eval and data.reward"),
    ("trainer.eval_teachers=true", ["data.eval=e", "data.reward=m:f"], "both data.eval and data.reward"),
    ("dataplane.storage_units=4", [*RAY, "dataplane.backend=transfer_queue"], "= 'transfer_queue'"),
    ("dataplane.queue_timeout_seconds=9.0", [*RAY, "dataplane.backend=transfer_queue"], "= 'transfer_queue'"),
    ("cluster.ray_auth=off", [*RAY, "cluster.address=h:1"], "needs cluster.backend = 'ray'"),
    ("teachers.t.token_env=T", ["teachers.t.placement=external", f"teachers.t.urls={URL}"], "the run's own token"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "others", "message"), CASES)
def test_a_key_without_effect_is_refused_with_what_it_needs_and_accepted_with_that(
    word: str, others: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        recipe(word)
    assert len(caught.value.problems) == 1
    recipe(word, *others)


@pytest.mark.parametrize("key", ["per_token_clamp", "loss_max_clamp"])
def test_a_clamp_is_refused_without_a_distillation_term(key: str) -> None:
    with pytest.raises(ConfigError, match=f"loss.{key} = 5.0 changes nothing .* loss.distill_coef above 0"):
        recipe(f"loss.{key}=5.0", "loss.distill_coef=0.0", *REWARDED)
    recipe(f"loss.{key}=5.0", *REWARDED)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("replicas", 2), ("threads", 4), ("device", "cuda"), ("dtype", "bfloat16"), ("max_batch_tokens", 4), ("revision", "abc"),
        ("tensor_parallel", 2),
    ],
)  # fmt: skip
def test_keys_of_our_own_processes_are_refused_for_an_external_teacher(key: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"`{key}` belongs to processes that this run starts; .* leave it out"
    ):
        recipe(
            "teachers.t.placement=external", f"teachers.t.urls={URL}", f"teachers.t.{key}={json.dumps(value)}"
        )


def test_an_fp8_kv_cache_is_refused_for_servers_with_the_servers_own_option() -> None:
    assert recipe("rollout.kv_cache=fp8").rollout.kv_cache == "fp8"
    with pytest.raises(ConfigError, match=r'vLLM takes engine_args = ."--kv-cache-dtype=fp8"'):
        recipe("rollout.kv_cache=fp8", *SERVERS)


def test_recompute_kv_false_needs_the_local_engine_and_partial_rollouts_in_async_mode() -> None:
    asynchronous = ("rollout.recompute_kv=false", "trainer.mode=fully_async")
    assert not recipe(*asynchronous).rollout.recompute_kv
    for others in (
        ("rollout.recompute_kv=false",),
        (*asynchronous, "trainer.partial_rollouts=false"),
        (*asynchronous, *SERVERS),
    ):
        with pytest.raises(ConfigError, match="hf' and generations that continue"):
            recipe(*others)


def test_several_keys_without_effect_are_reported_in_one_problem() -> None:
    with pytest.raises(
        ConfigError, match=r"`replicas`, `dtype` belong .* out \(replicas = 1, dtype = 'float32'\)"
    ):
        recipe(
            "teachers.t.placement=external",
            f"teachers.t.urls={URL}",
            "teachers.t.replicas=2",
            "teachers.t.dtype=bfloat16",
        )


def test_a_key_that_may_take_effect_later_is_accepted() -> None:
    hedged = recipe("teachers.t.hedge_after_seconds=2.0")  # replicas may join a run
    assert hedged.teachers["t"].hedge_after_seconds == 2.0
    # `understudy eval RUN --data …` takes these from the run.
    measured = recipe("trainer.eval_k=4", "trainer.solved_at=0.5").trainer
    assert (measured.eval_k, measured.solved_at) == (4, 0.5)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_recipes_are_accepted_and_equal_after_a_round_trip_through_the_run_directory(
    path: Path,
) -> None:
    """A run directory names every key, defaults too. None of them may be refused when it is read."""
    one = load_recipe(path)
    assert parse_recipe(json.loads(json.dumps(redact(one.model_dump())))) == one


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/*.md")), ids=lambda path: path.stem)
def test_no_toml_example_in_the_docs_sets_a_key_without_effect(path: Path) -> None:
    """Each TOML fragment is merged into a base recipe, since fragments leave out what they are not about."""
    for fragment in path.read_text().split("```toml\n")[1:]:
        tables = tomllib.loads(fragment.split("```")[0])
        base: dict[str, Any] = {
            "student": {"model": "s"},
            "teachers": {},
            "data": {"train": "d", "reward": "m:f"},
        }
        for name, keys in tables.items():
            base[name] = {**base.get(name, {}), **keys} if isinstance(keys, dict) else keys
        problems: list[str] = []
        try:
            parse_recipe(base)
        except UnderstudyError as error:
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        assert not [line for line in problems if "changes nothing in this recipe" in line], fragment
