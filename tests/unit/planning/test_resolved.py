"""What a recipe implies, as a table from its keys to the fields of `Resolved`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from understudy.config import Recipe, parse_recipe
from understudy.planning.resolved import Resolved, resolve, workers_write_rows

STUDENT = str(Path(str(resources.files("understudy.assets") / "quickstart")) / "models" / "student")
"""A small student whose files are in the package."""
REWARD = {"data.reward": "module:function", "loss.task_coef": 1.0, "rollout.n": 4}
GAE = REWARD | {"loss.advantage": "gae"}
ASYNC = {"trainer.mode": "fully_async"}
LORA = {"student.lora.rank": 4}
SERVERS = {"rollout.engine": "vllm", "rollout.vllm_python": "/python"}
QUEUE = {"cluster.backend": "ray", "dataplane.backend": "transfer_queue"}
CPU_POOL = {"cluster.pools.p.cpus_per_node": 4, "cluster.pools.p.nodes": 2}
REMOTE_WORKERS = QUEUE | CPU_POOL | {"rollout.workers": 2, "cluster.roles.workers": "p"}
BASE = LORA | {
    "student.lora.publish": "adapter", "rollout.processes": 2,
    "teachers.base.model": "student", "teachers.base.placement": "engine", "teachers.base.prompt": "{{ answer }}",
}  # fmt: skip
REMOTE_ENGINES = QUEUE | CPU_POOL | {"rollout.processes": 2, "cluster.roles.rollout": "p"}


def recipe(keys: dict[str, Any]) -> Recipe:
    """A recipe with these dotted keys and as few others as possible."""
    table: dict[str, Any] = {}
    for key, value in ({"student.model": STUDENT, "data.train": "d.jsonl"} | keys).items():
        *sections, name = key.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    table.setdefault("teachers", {"t": {"model": "org/t"}})
    return parse_recipe(table)


def answer(resolved: Resolved, question: str) -> Any:
    found: Any = resolved
    for name in question.split("."):
        found = getattr(found, name)
    return set(found()) if callable(found) else found


TABLE: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    # (name of the case, keys of the recipe, GPUs of the machine, expected answers)
    (
        "a plain recipe on a CPU",
        {},
        0,
        {
            "compute.deterministic": True,
            "compute.device": "cpu",
            "compute.threads": None,
            "compute.lanes": 1,
            "compute.without_onednn": False,
            "student.device": "cpu",
            "critic": None,
            "reference": None,
            "models_beside": {},
            "engine.deterministic": True,
            "engine.shares_tensors": True,
            "engine.adapters_only": False,
            "engine.candidates": 0,
            "engine.beside_trainer": True,
            "teachers.k": 64,
            "teachers.topk": 64,
            "teachers.routes": None,
            "teachers.deterministic": True,
            "rows.workers_write": False,
            "rows.ranks_fetch": False,
            "rows.drop_when_acked": True,
            "produce.scored": True,
            "produce.deterministic": True,
            "produce.dead_letters_allowed": 64,
            "produce.dump_every": 0,
            "produce.keep_rows": 32 << 20,
            "produce.evaluation.teachers": {},
            "learn.scored": True,
            "learn.deterministic": True,
            "learn.lanes": 1,
            "learn.one_update_per_step": True,
        },
    ),
    (
        "the same recipe with a GPU",
        {},
        1,
        {
            "compute.deterministic": False,
            "compute.device": "cuda",
            "student.device": "cuda",
            "engine.deterministic": False,
            "engine.shares_tensors": True,
            "teachers.deterministic": False,
            "rows.drop_when_acked": False,
        },
    ),
    # Determinism: run.determinism decides. If it is not set, the schedule, the engine and the device do.
    ("full on a GPU", {"run.determinism": "full"}, 1, {"compute.deterministic": True}),
    ("fast on a CPU", {"run.determinism": "fast"}, 0, {"compute.deterministic": False}),
    (
        "a CPU student beside GPUs",
        {"student.device": "cpu"},
        4,
        {"compute.deterministic": True, "compute.device": "cpu"},
    ),
    (
        "a named GPU",
        {"student.device": "cuda:3"},
        4,
        {"compute.deterministic": False, "compute.device": "cuda:3"},
    ),
    ("a GPU that is not there", {"student.device": "cuda"}, 0, {"compute.deterministic": False}),
    ("async, stale", ASYNC, 0, {"compute.deterministic": False, "rows.drop_when_acked": False}),
    ("async, on-policy", ASYNC | {"trainer.max_staleness": 0}, 0, {"compute.deterministic": True}),
    (
        "async, on-policy, two updates per publish",
        ASYNC | {"trainer.max_staleness": 0, "trainer.sync_every": 2},
        0,
        {"compute.deterministic": False},
    ),
    ("servers", SERVERS, 0, {"compute.deterministic": False, "engine.deterministic": False}),
    (
        "engine processes",
        {"rollout.processes": 2},
        0,
        {"compute.deterministic": True, "engine.shares_tensors": True},
    ),
    # Threads and lanes.
    (
        "a small student in lanes",
        {"run.threads": 3},
        0,
        {
            "compute.lanes": 3,
            "compute.threads": 1,
            "compute.without_onednn": True,
            "learn.lanes": 3,
            "engine.threads": 1,
        },
    ),
    (
        "no lanes with one thread",
        {"run.threads": 1},
        0,
        {"compute.lanes": 1, "compute.threads": 1, "compute.without_onednn": False},
    ),
    ("no lanes on a GPU", {"run.threads": 3}, 1, {"compute.lanes": 1, "compute.threads": 3}),
    (
        "no lanes with two ranks",
        {"run.threads": 4, "trainer.ranks": 2},
        0,
        {"compute.lanes": 1, "compute.threads": 4},
    ),
    (
        "no lanes with compiled layers",
        {"run.threads": 3, "student.compile": True},
        0,
        {"compute.lanes": 1, "compute.threads": 3},
    ),
    (
        "no lanes for a model from the hub",
        {"run.threads": 3, "student.model": "org/s"},
        0,
        {"compute.lanes": 1, "compute.threads": 3},
    ),
    (
        "lanes in half precision",
        {"run.threads": 3, "student.dtype": "bfloat16"},
        0,
        {"compute.lanes": 3, "compute.without_onednn": False},
    ),
    ("lanes in async", ASYNC | {"run.threads": 3}, 0, {"compute.lanes": 3, "compute.deterministic": False}),
    ("lanes with LoRA", LORA | {"run.threads": 3}, 0, {"compute.lanes": 3, "engine.shares_tensors": False}),
    (
        "lanes with a critic from the student's model",
        GAE | {"run.threads": 3},
        0,
        {"compute.lanes": 3, "critic.lanes": 3},
    ),
    (
        "no lanes with a critic from the hub",
        GAE | {"run.threads": 3, "critic.model": "org/c"},
        0,
        {"compute.lanes": 1, "critic.lanes": 1, "compute.threads": 3},
    ),
    # Whether the engine shares the trained tensors, and what a publish sends.
    ("async copies", ASYNC, 0, {"engine.shares_tensors": False}),
    ("on-policy async copies too", ASYNC | {"trainer.max_staleness": 0}, 0, {"engine.shares_tensors": False}),
    ("ranks copy", {"trainer.ranks": 2}, 0, {"engine.shares_tensors": False}),
    (
        "adapters are merged into a copy",
        LORA,
        0,
        {"engine.shares_tensors": False, "engine.adapters_only": False},
    ),
    (
        "adapters alone to engine processes",
        LORA | {"student.lora.publish": "adapter", "rollout.processes": 2},
        0,
        {
            "engine.shares_tensors": False,
            "engine.adapters_only": True,
            "compute.deterministic": True,
            "engine.scored_base": None,
        },
    ),
    (
        "the base scores in engine processes",
        BASE | {"student.lora.targets": ["q_proj"], "student.freeze_vision": False},
        0,
        {"engine.scored_base.targets": ["q_proj"], "engine.scored_base.freeze_vision": False},
    ),
    (
        "async, ranks, LoRA, engine processes",
        ASYNC | LORA | {"trainer.ranks": 2, "rollout.processes": 2, "run.threads": 4},
        0,
        {
            "engine.shares_tensors": False,
            "compute.lanes": 1,
            "compute.deterministic": False,
            "rows.ranks_fetch": False,
        },
    ),
    # Where the critic sits, and what it is loaded from.
    (
        "a critic in the trainer's process",
        GAE,
        0,
        {
            "critic.own_process": False,
            "critic.process_device": "auto",
            "critic.source.model": STUDENT,
            "critic.source.device": "cpu",
            "critic.optimizer": "adamw",
            "critic.steps": 100,
            "models_beside": {},
            "learn.one_update_per_step": False,
        },
    ),
    ("a critic on the student's GPU", GAE, 2, {"critic.own_process": False, "critic.source.device": "cuda"}),
    (
        "a critic in its own process",
        GAE | {"critic.process": True, "critic.device": "cuda:1"},
        2,
        {"critic.own_process": True, "critic.process_device": "cuda:1"},
    ),
    (
        "a critic's own process beside a student on a CPU",
        GAE | {"critic.process": True, "student.device": "cpu", "run.threads": 4},
        2,
        {"critic.own_process": True, "critic.process_device": "cpu", "critic.process_threads": 4},
    ),
    (
        "a critic with a pool has its own process",
        GAE | CPU_POOL | {"cluster.backend": "ray", "cluster.roles.critic": "p"},
        0,
        {"critic.own_process": True},
    ),
    (
        "a critic in its own process, in async",
        GAE | ASYNC | {"critic.process": True},
        0,
        {"critic.own_process": True, "engine.shares_tensors": False},
    ),
    (
        "a critic's own model is not pinned to the student's revision",
        GAE
        | {
            "student.revision": "abc",
            "critic.model": "org/c",
            "critic.dtype": "bfloat16",
            "critic.attention": "eager",
        },
        0,
        {
            "critic.source.model": "org/c",
            "critic.source.revision": None,
            "critic.source.dtype": "bfloat16",
            "critic.source.attention": "eager",
            "models_beside": {"critic": "org/c"},
        },
    ),
    (
        "a critic from the student's model has the student's revision",
        GAE | {"student.revision": "abc", "student.attention": "sdpa"},
        0,
        {
            "critic.source.revision": "abc",
            "critic.source.attention": "sdpa",
            "critic.source.dtype": "float32",
        },
    ),
    # The reference.
    (
        "the reference is the initial student",
        {"loss.kl_coef": 0.1, "student.revision": "abc", "student.dtype": "bfloat16"},
        1,
        {
            "reference.model": STUDENT,
            "reference.revision": "abc",
            "reference.dtype": "bfloat16",
            "reference.device": "cuda",
            "models_beside": {},
        },
    ),
    (
        "a reference model of its own does not inherit trust_remote_code",
        {
            "loss.kl_coef": 0.1,
            "student.trust_remote_code": True,
            "student.revision": "abc",
            "reference.model": "org/r",
        },
        0,
        {
            "reference.model": "org/r",
            "reference.revision": None,
            "reference.trust_remote_code": False,
            "reference.dtype": "float32",
            "models_beside": {"reference": "org/r"},
        },
    ),
    # Signals: what engines and teachers must name per token.
    (
        "sampled",
        {"loss.signal": "sampled", "loss.kind": "k2"},
        0,
        {"teachers.k": 0, "teachers.topk": 0, "engine.candidates": 0},
    ),
    (
        "the student's candidates",
        {"loss.signal": "at_ids", "loss.kind": "reverse_kl", "loss.topk": 8},
        0,
        {"teachers.k": 8, "teachers.topk": 0, "engine.candidates": 8},
    ),
    (
        "full vocabulary",
        {"loss.signal": "hidden", "loss.teacher_temperature": 2.0},
        0,
        {"teachers.k": 0, "teachers.topk": 0, "teachers.temperature": 2.0},
    ),
    # Routing.
    (
        "several teachers",
        {
            "teachers.a.model": "org/a",
            "teachers.a.key": "add",
            "teachers.b.model": "org/b",
            "data.default_teacher": "b",
        },
        0,
        {"teachers.routes": {"add": "a"}, "teachers.default": "b"},
    ),
    # Which process writes rows, and which reads them.
    (
        "workers on other machines",
        REMOTE_WORKERS,
        0,
        {"rows.workers_write": True, "engine.beside_trainer": True},
    ),
    (
        "workers and engines on other machines",
        REMOTE_WORKERS | REMOTE_ENGINES,
        0,
        {"rows.workers_write": True, "engine.beside_trainer": False},
    ),
    (
        "the same under full determinism, in async",
        REMOTE_WORKERS | REMOTE_ENGINES | ASYNC | {"trainer.max_staleness": 0},
        0,
        {"rows.workers_write": True, "rows.drop_when_acked": True, "compute.deterministic": True},
    ),
    (
        "workers on this machine",
        QUEUE | {"rollout.workers": 2},
        0,
        {"rows.workers_write": False},
    ),
    (
        "remote workers with the embedded data plane",
        REMOTE_WORKERS | {"dataplane.backend": "embedded"},
        0,
        {"rows.workers_write": False},
    ),
    (
        "workers in a pool of this machine",
        {"cluster.pools.p.cpus_per_node": 4, "rollout.workers": 2, "cluster.roles.workers": "p"},
        0,
        {"rows.workers_write": False, "engine.beside_trainer": True},
    ),
    (
        "ranks fetch from the queue",
        QUEUE | {"trainer.ranks": 2, "dataplane.queue_timeout_seconds": 5.0},
        0,
        {"rows.ranks_fetch": True, "rows.fetch_seconds": 5.0, "rows.workers_write": False},
    ),
    ("one rank does not fetch from the queue", QUEUE, 0, {"rows.ranks_fetch": False, "produce.keep_rows": 0}),
    (
        "ranks and remote workers",
        REMOTE_WORKERS | {"trainer.ranks": 2},
        0,
        {"rows.ranks_fetch": True, "rows.workers_write": True, "engine.shares_tensors": False},
    ),
    # Rewards alone, dead letters, evaluation.
    (
        "no teacher",
        REWARD | {"teachers": {}, "loss.distill_coef": 0},
        0,
        {"produce.scored": False, "learn.scored": False, "teachers.routes": None, "engine.candidates": 0},
    ),
    (
        "one row may always fail",
        {"trainer.max_dead_letters": 0},
        0,
        {"produce.dead_letters_allowed": 1},
    ),
    (
        "a share of all rows of the run, rounded down",
        {"trainer.max_dead_letters": 0.1, "trainer.steps": 3, "trainer.batch_size": 5, "rollout.n": 3},
        0,
        {"produce.dead_letters_allowed": 4, "produce.batch_size": 5},
    ),
    (
        "only teachers that this run can load are evaluated",
        REWARD
        | {
            "data.eval": "e.jsonl",
            "trainer.eval_teachers": True,
            "teachers.a.model": "org/a",
            "teachers.a.key": "add",
            "teachers.b.model": "org/b",
            "teachers.b.key": "sort",
            "teachers.b.placement": "external",
            "teachers.b.urls": ["http://host:1"],
            "teachers.b.replicas": 1,
        },
        0,
        {"produce.evaluation.teachers.keys": {"a"}},
    ),
    # The windows of a fully async run.
    (
        "staleness and publishes",
        ASYNC | {"trainer.batch_size": 4, "trainer.sync_every": 2, "trainer.max_staleness": 0.5},
        0,
        {"learn.windows.size": 8, "learn.windows.slots": 12, "learn.windows.oldest": 1},
    ),
    (
        "no more prompts than the data plane holds",
        ASYNC
        | {"trainer.batch_size": 4, "trainer.max_staleness": 3, "rollout.n": 2, "dataplane.max_rows": 20},
        0,
        {"learn.windows.max_prompts": 10, "learn.windows.slots": 10},
    ),
    # Updates per step.
    (
        "mini-batches",
        {"trainer.batch_size": 8, "trainer.mini_batch_size": 4},
        0,
        {"learn.one_update_per_step": False},
    ),
    (
        "one mini-batch",
        {"trainer.batch_size": 8, "trainer.mini_batch_size": 8},
        0,
        {"learn.one_update_per_step": True},
    ),
    ("epochs", {"trainer.epochs": 2}, 0, {"learn.one_update_per_step": False}),
]


@pytest.mark.parametrize(
    ("keys", "gpus", "answers"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_resolve_answers_what_a_recipe_implies(
    keys: dict[str, Any], gpus: int, answers: dict[str, Any]
) -> None:
    resolved = resolve(recipe(keys), gpus)
    assert {question: answer(resolved, question) for question in answers} == answers


def test_records_of_resolved_for_different_consumers_agree() -> None:
    for _, keys, gpus, _ in TABLE:
        one = resolve(recipe(keys), gpus)
        assert one.compute.deterministic is one.engine.deterministic is one.teachers.deterministic
        assert one.compute.deterministic is one.produce.deterministic is one.learn.deterministic
        assert one.compute.lanes == one.learn.lanes
        assert one.compute.seed == one.learn.seed == one.produce.seed
        assert one.compute.threads == one.engine.threads and one.compute.device == one.student.device
        assert one.rows.workers_write is workers_write_rows(recipe(keys))
