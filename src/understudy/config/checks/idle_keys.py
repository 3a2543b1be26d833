"""Refuses keys that are set but have no effect, because the user expects one.

A key counts as set if it differs from its default. A run directory holds every key of its recipe, so an
explicit `beta = 0.5` cannot be distinguished from the default there, and it has no effect either way. Keys
that are only redundant are allowed, such as a teacher's `hedge_after_seconds` with one replica: more
replicas may join the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from understudy.config.tables import RecipeTables


@dataclass(frozen=True, slots=True)
class _Rule:
    section: str
    keys: tuple[str, ...]
    matters: Callable[[RecipeTables], bool]
    when: str
    """What a user would have to set for the keys to have an effect."""


def _policy_gradient(recipe: RecipeTables) -> bool:
    return recipe.loss.task_coef > 0 or recipe.loss.policy_gradient


def _evaluates(recipe: RecipeTables) -> bool:
    return recipe.data.eval is not None and recipe.data.reward is not None


def _given_answers(recipe: RecipeTables) -> bool:
    return recipe.rollout.off_policy > 0


_RULES = (
    _Rule("loss", ("beta",), lambda r: r.loss.kind == "jsd", "loss.kind = 'jsd'"),
    _Rule(
        "loss",
        ("alpha",),
        lambda r: r.loss.kind.startswith("skew_"),
        "loss.kind = 'skew_forward_kl' or 'skew_reverse_kl'",
    ),
    _Rule("loss", ("mixture_weight",), lambda r: r.loss.kind == "mixture", "loss.kind = 'mixture'"),
    _Rule(
        "loss",
        ("per_token_clamp", "loss_max_clamp"),
        lambda r: r.loss.distill_coef > 0,
        "a distillation term: loss.distill_coef above 0",
    ),
    _Rule(
        "loss",
        ("clip_low", "clip_high", "dual_clip", "tis_cap"),
        _policy_gradient,
        "a policy gradient: loss.task_coef above 0, or loss.policy_gradient = true",
    ),
    _Rule(
        "loss",
        ("gamma",),
        lambda r: r.loss.task_coef > 0 and r.loss.advantage in ("reinforce++", "gae"),
        "loss.advantage = 'reinforce++' or 'gae' and loss.task_coef above 0",
    ),
    _Rule("loss", ("sft_coef",), _given_answers, "given answers: rollout.off_policy above 0"),
    _Rule("rollout", ("answer_column",), _given_answers, "given answers: rollout.off_policy above 0"),
    _Rule("loss", ("lam",), lambda r: r.loss.advantage == "gae", "loss.advantage = 'gae'"),
    _Rule(
        "loss.correction",
        ("cap",),
        lambda r: r.loss.correction.weigh != "off",
        "loss.correction.weigh = 'token', 'sequence' or 'geometric'",
    ),
    _Rule(
        "loss.correction",
        ("low", "high"),
        lambda r: r.loss.correction.drop != "off",
        "loss.correction.drop = 'token', 'sequence' or 'geometric'",
    ),
    _Rule(
        "rollout",
        ("token_env", "served_model"),
        lambda r: bool(r.rollout.urls),
        "running servers: rollout.urls",
    ),
    _Rule(
        "rollout",
        ("kv_cache",),
        lambda r: r.rollout.engine == "hf",
        "rollout.engine = 'hf'; vLLM takes engine_args = [\"--kv-cache-dtype=fp8\"]",
    ),
    _Rule(
        "rollout",
        ("recompute_kv",),
        lambda r: (
            r.rollout.engine == "hf" and r.trainer.mode == "fully_async" and r.trainer.partial_rollouts
        ),
        "rollout.engine = 'hf' and generations that continue under new weights: trainer.mode = 'fully_async' with "
        "trainer.partial_rollouts",
    ),
    _Rule(
        "rollout",
        ("snapshots",),
        lambda r: r.rollout.engine != "hf" and r.rollout.live_weights,
        "servers that get new weights: rollout.engine = 'vllm' or 'sglang' with live_weights",
    ),
    _Rule(
        "rollout", ("max_refills",), lambda r: r.rollout.filter_groups, "rollout.filter_groups = true"
    ),
    _Rule(
        "rollout",
        ("overlong_penalty",),
        lambda r: r.rollout.overlong_buffer is not None,
        "rollout.overlong_buffer, the stretch over which the reward falls",
    ),
    _Rule(
        "trainer", ("eval_every", "eval_samples", "eval_teachers"), _evaluates, "both data.eval and data.reward"
    ),
    _Rule(
        "dataplane",
        ("storage_units", "queue_timeout_seconds"),
        lambda r: r.dataplane.backend == "transfer_queue",
        "dataplane.backend = 'transfer_queue'",
    ),
    _Rule("cluster", ("ray_auth",), lambda r: r.cluster.backend == "ray", "cluster.backend = 'ray'"),
)  # fmt: skip


def idle_problems(recipe: RecipeTables) -> list[str]:
    problems = []
    for rule in _RULES:
        section: Any = recipe
        for part in rule.section.split("."):
            section = getattr(section, part)
        for key in rule.keys:
            default, value = type(section).model_fields[key].default, getattr(section, key)
            if value not in (default, "") and not rule.matters(recipe):
                usual = "" if default is None else f" (its default is {default!r})"
                problems.append(
                    f"{rule.section}.{key} = {value!r} changes nothing in this recipe: it needs {rule.when}; set that, or leave "
                    f"{key} out{usual}"
                )
    return problems
