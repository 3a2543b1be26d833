"""Where the roles of a recipe sit on the machines of a Ray cluster."""

from typing import Any

import pytest

from understudy.cli.main import main
from understudy.cluster.ray_layout import Bundle, NodeFacts, Spread, UnitBundle
from understudy.config import Recipe, parse_recipe
from understudy.errors import ClusterError, ConfigError
from understudy.planning.preflight import missing_extras
from understudy.planning.ray_seating import beside_the_trainer, gpus_outside_ray, ray_layout
from understudy.planning.seating import ROLLOUT, seat

NODES = [NodeFacts("a", Bundle(8), Bundle(8), True), NodeFacts("b", Bundle(8), Bundle(8))]
WITH_GPUS = [NodeFacts("a", Bundle(8, 4), Bundle(8, 4), True)]


def recipe(**sections: Any) -> Recipe:
    table: dict[str, Any] = {
        "student": {"model": "student", "device": "cpu"},
        "teachers": {"math": {"model": "teacher", "replicas": 2, "threads": 3}},
        "data": {"train": "rows.jsonl"},
        "cluster": {"backend": "ray"},
    }
    return parse_recipe({**table, **sections})


def test_each_replica_of_a_standalone_teacher_gets_its_own_bundle() -> None:
    layout = ray_layout(recipe(), NODES)
    assert layout.groups["teacher-math"].bundles == (Bundle(3), Bundle(3))
    assert layout.groups["teacher-math"].spread is Spread.LOOSE
    assert layout.bundle_of("teacher-math-1-rank1") == layout.bundle_of("teacher-math-1")
    assert layout.units["teacher-math-1"].bundle == 1
    tensor_parallel = recipe(teachers={"math": {"model": "teacher", "tensor_parallel": 2}})
    assert ray_layout(tensor_parallel, WITH_GPUS).groups["teacher-math"].bundles == (Bundle(1, 2),)
    by_hand = recipe(teachers={"math": {"model": "teacher", "device": "cpu"}})
    assert ray_layout(by_hand, WITH_GPUS).groups["teacher-math"].bundles == (Bundle(1),)


def test_engines_beside_the_trainer_use_only_gpus_of_the_students_pool() -> None:
    """Ray reserves the student's pool for the run. It may give the machine's other GPUs to other programs."""
    student, processes = {"model": "student"}, {"processes": 2}
    cluster = {
        "backend": "ray",
        "pools": {"s": {"nodes": 1, "gpus_per_node": 3}},
        "roles": {"student": "s"},
    }
    pooled = recipe(student=student, cluster=cluster, rollout=processes)
    assert gpus_outside_ray(pooled) == 3
    seating = seat(beside_the_trainer(pooled), 3)
    assert [seating.gpus(ROLLOUT, unit) for unit in range(2)] == [[1], [2]] and seating.shared() is None
    bare = recipe(student=student, rollout=processes)
    assert gpus_outside_ray(bare) == 1
    assert "GPU 0: student/0 + rollout/0 + rollout/1" in (seat(beside_the_trainer(bare), 1).shared() or "")
    assert gpus_outside_ray(recipe(student=student)) is None


def test_a_pool_has_one_bundle_per_node_and_the_trainer_leads_the_students_pool() -> None:
    cluster = {
        "backend": "ray",
        "pools": {"t": {"nodes": 2, "cpus_per_node": 2}, "s": {"nodes": 2, "cpus_per_node": 1}},
        "roles": {"student": "s"},
    }
    teachers = {"math": {"model": "m", "placement": "pool", "pool": "t", "replicas": 2, "threads": 2}}
    whole = recipe(cluster=cluster, teachers=teachers, trainer={"ranks": 2}, run={"threads": 1})
    layout = ray_layout(whole, NODES)
    assert {name: (len(g.bundles), g.spread, g.leads) for name, g in layout.groups.items()} == {
        "pool t": (2, Spread.STRICT, False),
        "pool s": (2, Spread.STRICT, True),
    }
    assert [layout.units[f"teacher-math-{unit}"].bundle for unit in (0, 1)] == [0, 1]
    assert layout.units["rank-1"].bundle == 1 and layout.units["rank-1"].share == Bundle(1)
    here = beside_the_trainer(whole)
    assert here.trainer.ranks == 1 and not here.teachers and not here.cluster.pools


def test_a_fully_async_run_refuses_a_teacher_in_the_students_pool() -> None:
    pool = {"nodes": 2, "cpus_per_node": 2}
    cluster = {"backend": "ray", "pools": {"t": pool, "s": pool}, "roles": {"student": "s"}}
    teacher = {"model": "teacher", "placement": "pool", "pool": "t", "replicas": 2, "threads": 2}
    trainer = {"mode": "fully_async", "ranks": 2}
    layout = ray_layout(recipe(teachers={"math": teacher}, cluster=cluster, trainer=trainer), NODES)
    assert layout.units["teacher-math-0"] == UnitBundle("pool t", 0, Bundle(2))
    assert layout.units["teacher-math-1"] == UnitBundle("pool t", 1, Bundle(2))
    with pytest.raises(
        ConfigError, match=r"teachers\.math\.pool = 's' is the pool of cluster\.roles\.student too"
    ):
        recipe(teachers={"math": {**teacher, "pool": "s"}}, cluster=cluster, trainer=trainer)


def test_a_teacher_replica_over_two_machines_is_refused() -> None:
    cluster = {"backend": "ray", "pools": {"t": {"nodes": 2, "gpus_per_node": 2}}}
    teachers = {"math": {"model": "m", "placement": "pool", "pool": "t", "tensor_parallel": 4}}
    with pytest.raises(ClusterError, match="sits on several machines"):
        ray_layout(recipe(cluster=cluster, teachers=teachers), WITH_GPUS)


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"cluster": {"address": "auto"}}, "cluster.backend = 'ray'"),
        ({"cluster": {}, "dataplane": {"backend": "transfer_queue"}}, "runs on Ray"),
        ({"cluster": {"backend": "ray", "ray_auth": "off"}}, "has a token"),
    ],
)
def test_contradicting_cluster_settings_are_refused(sections: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        recipe(**sections)


@pytest.mark.parametrize(
    ("asked", "extras"),
    [
        ({"dataplane": {"backend": "transfer_queue"}}, ["ray", "ray"]),
        ({"cluster": {}, "student": {"model": "org/student", "lora": {"rank": 4}}}, ["lora"]),
        (
            {
                "cluster": {},
                "data": {"train": "x", "reward": "understudy.rollout.rewards.math_reward:math_verify"},
            },
            ["math"],
        ),
        ({"cluster": {}}, []),
    ],
)
def test_a_missing_extra_is_reported_with_the_pip_command(
    asked: dict[str, Any], extras: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = recipe(**asked)
    monkeypatch.setattr("understudy.planning.preflight.find_spec", lambda name: None)
    problems = missing_extras(asking)
    assert [problem.partition("pip install ")[2] for problem in problems] == [
        f'"understudy[{extra}]"' for extra in extras
    ]


def test_engines_and_workers_sit_in_the_pool_of_their_role() -> None:
    cluster = {
        "backend": "ray",
        "pools": {"write": {"nodes": 2, "cpus_per_node": 4}},
        "roles": {"rollout": "write", "workers": "write"},
    }
    whole = recipe(
        teachers={"math": {"model": "t"}},
        cluster=cluster,
        rollout={"processes": 3, "workers": 2},
        run={"threads": 2},
    )
    layout = ray_layout(whole, NODES)
    assert layout.groups["pool write"].bundles == (Bundle(4), Bundle(4))
    assert [layout.units[f"rollout-{unit}"].bundle for unit in range(3)] == [0, 0, 1]
    assert {layout.units[f"rollout-{unit}"].share for unit in range(3)} == {Bundle(2)}, "one CPU per thread"
    assert [layout.units[f"rollout-worker-{unit}"].bundle for unit in range(2)] == [1, 1]
    on_gpus = {**cluster, "pools": {"write": {"nodes": 1, "gpus_per_node": 2, "cpus_per_node": 1}}}
    shared = recipe(
        student={"model": "s"}, cluster=on_gpus, rollout={"processes": 2, "workers": 1}, run={"threads": 2}
    )
    layout = ray_layout(shared, WITH_GPUS)
    assert layout.units["rollout-1"].share == Bundle(0, 1) and layout.units[
        "rollout-worker-0"
    ].share == Bundle(1)
    beside = recipe(rollout={"processes": 2, "workers": 2})
    assert not [name for name in ray_layout(beside, NODES).units if name.startswith("rollout")]


def test_vllm_servers_sit_in_the_pool_of_rollouts_and_take_nothing_of_the_trainers_machine() -> None:
    pools = {"write": {"nodes": 2, "gpus_per_node": 2}}
    cluster = {"backend": "ray", "pools": pools, "roles": {"rollout": "write"}}
    whole = recipe(
        student={"model": "s"},
        cluster=cluster,
        rollout={"engine": "vllm", "replicas": 2, "engine_args": ["--tensor-parallel-size=2"]},
    )
    layout = ray_layout(whole, WITH_GPUS)
    assert [layout.units[f"vllm-replica-{unit}"].bundle for unit in range(2)] == [0, 1]
    assert {layout.units[f"vllm-replica-{unit}"].share for unit in range(2)} == {Bundle(0, 2)}
    assert not beside_the_trainer(whole).rollout.starts_servers


@pytest.mark.parametrize(
    ("role", "rollout", "word"),
    [
        ("rollout", {}, "set rollout.processes"),
        ("workers", {"processes": 1}, "set rollout.workers"),
        ("rollout", {"processes": 1, "devices": ["0"]}, "both say where"),
    ],
)
def test_a_role_without_processes_of_its_own_is_refused_with_the_setting_to_change(
    role: str, rollout: dict[str, Any], word: str
) -> None:
    cluster = {"backend": "ray", "pools": {"p": {"nodes": 1, "gpus_per_node": 4}}, "roles": {role: "p"}}
    with pytest.raises(ClusterError, match=word):
        ray_layout(recipe(cluster=cluster, rollout=rollout), WITH_GPUS)


@pytest.mark.parametrize("name", ["teacher-math", "reference"])
def test_an_unknown_role_is_refused_with_the_list_of_roles(name: str) -> None:
    cluster = {"backend": "ray", "pools": {"p": {"nodes": 1, "cpus_per_node": 4}}, "roles": {name: "p"}}
    with pytest.raises(ConfigError, match=r"takes 'student', 'rollout', 'workers' or 'critic'"):
        recipe(cluster=cluster)


def test_plan_draws_a_pool_with_its_engines_and_workers(
    quickstart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "cluster.backend=ray",
        "cluster.pools.write.nodes=2",
        "cluster.pools.write.cpus_per_node=2",
        "cluster.roles.rollout=write",
        "cluster.roles.workers=write",
        "rollout.processes=3",
        "rollout.workers=1",
        "run.threads=1",
        "dataplane.backend=transfer_queue",
    ]
    assert main(["plan", *quickstart, *arguments]) == 0
    drawn = capsys.readouterr().out
    assert "pool write: 2 nodes × 2 CPUs" in drawn
    assert "node 0 │ 0 rollout/0 │ 1 rollout/1 │" in drawn and "node 1 │ 0 rollout/2 │ 1 workers/0 │" in drawn
    assert "on Ray, pool write: 2 × (2 CPU) on machines of their own" in drawn
    assert "on Ray, TransferQueue: 3 × (1 CPU)" in drawn and "rollout-worker-0" in drawn
