"""Seats of a recipe's roles on this machine, and how replica processes are started on them."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.assembly.teachers.launchers import LocalTeachers
from understudy.cli.main import main
from understudy.cluster.local import Child, LocalProcesses
from understudy.config import Recipe, load_recipe, parse_recipe
from understudy.errors import ClusterError, ConfigError
from understudy.planning.processes import plan_processes
from understudy.planning.seating import ROLLOUT, STUDENT, Seats, rollout_devices, seat


def recipe(teachers: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    named = teachers or {"math": {"model": "org/math", "key": "m"}, "code": {"model": "org/code", "key": "c"}}
    return parse_recipe(
        {"student": {"model": "org/student"}, "teachers": named, "data": {"train": "x.jsonl"}, **sections}
    )


def test_standalone_teachers_get_their_own_gpus_and_share_one_if_there_are_too_few() -> None:
    seating = seat(recipe(), 4)
    assert seating.gpus(STUDENT, 0) == [0]
    assert (seating.gpus("teacher-math", 0), seating.gpus("teacher-code", 0)) == ([1], [2])
    assert seating.shared() is None
    fewer = seat(recipe(), 2)
    assert fewer.gpus("teacher-math", 0) == fewer.gpus("teacher-code", 0) == [1]
    assert "GPU 1: teacher-math/0 + teacher-code/0." in (fewer.shared() or "")
    wide = {"math": {"model": "org/m", "tensor_parallel": 2}}
    with pytest.raises(ClusterError, match=r"= 3: 1 too many[\s\S]*to share one on purpose"):
        seat(recipe(wide), 2)


def test_all_roles_share_the_only_gpu() -> None:
    seating = seat(recipe(), 1)
    assert (
        seating.gpus(STUDENT, 0) == seating.gpus("teacher-math", 0) == seating.gpus("teacher-code", 0) == [0]
    )
    assert "0 student/0 + teacher-math/0 + teacher-code/0" in seating.placement.drawing()


def test_a_machine_without_gpus_has_no_seats() -> None:
    seating = seat(recipe(), 0)
    assert not seating.placement.pools and seating.gpus(STUDENT, 0) == []


def test_a_gpu_named_for_one_teacher_is_not_given_to_another() -> None:
    teachers = {
        "math": {"model": "org/m", "key": "m", "device": "cuda:1"},
        "code": {"model": "org/c", "key": "c"},
    }
    seating = seat(recipe(teachers), 3)
    assert (seating.gpus("teacher-math", 0), seating.gpus("teacher-code", 0)) == ([1], [2])
    with pytest.raises(ClusterError, match="this machine has 1 GPUs"):
        seat(recipe(teachers), 1)


POOLED = {
    "teachers": {
        "math": {
            "model": "org/m",
            "key": "m",
            "placement": "pool",
            "pool": "scoring",
            "replicas": 2,
            "tensor_parallel": 2,
        },
        "code": {"model": "org/c", "key": "c", "placement": "external", "urls": ["http://elsewhere:8000"]},
    },
    "cluster": {
        "pools": {"scoring": {"gpus_per_node": 4}, "train": {"gpus_per_node": 2}},
        "roles": {"student": "train"},
    },
    "trainer": {"ranks": 2},
}


def test_pools_are_slices_of_the_machine_and_the_students_pool_comes_first() -> None:
    seating = seat(recipe(**POOLED), 6)
    assert [seating.gpus(STUDENT, rank) for rank in range(2)] == [[0], [1]]
    assert [seating.gpus("teacher-math", unit) for unit in range(2)] == [[2, 3], [4, 5]]
    with pytest.raises(ClusterError, match=r"ask for 6 GPUs \(scoring 4 \+ train 2\); this machine has 5"):
        seat(recipe(**POOLED), 5)
    assert seat(recipe(**POOLED), None).claims.keys() == {STUDENT, "teacher-math"}


def test_each_vllm_server_gets_as_many_gpus_as_its_tensor_parallel_size() -> None:
    rollout = {"engine": "vllm", "replicas": 2, "engine_args": ["--tensor-parallel-size=2"]}
    one = recipe({"t": {"model": "org/t"}}, rollout=rollout)
    seating = seat(one, 6)
    names = ["g0", "g1", "g2", "g3", "g4", "g5"]
    assert rollout_devices(one.rollout, seating, names) == ["g1,g2", "g3,g4"]
    assert seating.gpus("teacher-t", 0) == [5] and seating.claims[ROLLOUT].world_size == 2
    by_hand = recipe({"t": {"model": "org/t"}}, rollout={"engine": "vllm", "devices": ["1"]})
    assert rollout_devices(by_hand.rollout, seat(by_hand, 3), names) == ["1"]
    assert seat(by_hand, 3).gpus("teacher-t", 0) == [2]


SEED = Path(__file__).parents[3] / "recipes" / "seed-scenario" / "recipe.toml"


def seats_of(one: Recipe, gpus: int, names: list[str] | None = None) -> dict[str, str]:
    return {p.name: p.device for p in plan_processes(one, seat(one, gpus, gpu_names=names))}


def test_the_seed_scenario_takes_one_rollout_gpu_two_training_gpus_and_one_teacher_gpu() -> None:
    one = load_recipe(SEED)
    ranks = {"trainer": "cuda:0", "rank-1": "cuda:1"}
    on_four = {"rollout-0": "cuda:2", "teacher-add-0": "cuda:3", "teacher-sort-0": "cuda:3"}
    assert seats_of(one, 4) == ranks | on_four
    assert "GPU 3: teacher-add/0 + teacher-sort/0." in (seat(one, 4).shared() or "")
    assert seats_of(one, 5) == seats_of(one, 8) == ranks | on_four | {"teacher-sort-0": "cuda:4"}
    assert seat(one, 5).shared() is None
    assert seats_of(one, 3) == ranks | dict.fromkeys(on_four, "cuda:2")
    assert seats_of(one, 2) == ranks | dict.fromkeys(on_four, "cuda:1") | {"rollout-0": "cuda:0"}
    assert "GPU 0: student/0 + rollout/0; GPU 1: student/1 + teacher-add/0" in (seat(one, 2).shared() or "")
    with pytest.raises(ClusterError, match=r"trainer.ranks = 2 .* 1 GPU; .*student.device = 'cuda:0'"):
        seat(one, 1)
    on_one = one.model_copy(update={"student": one.student.model_copy(update={"device": "cuda:0"})})
    assert set(seats_of(on_one, 1).values()) == {"cuda:0"}
    assert "GPU 0: student/0 + student/1 + rollout/0 + teacher-add/0" in (seat(on_one, 1).shared() or "")
    # With one teacher nothing is shared.
    alone = load_recipe(SEED).model_copy(update={"teachers": {"t": one.teachers["add"]}})
    assert seats_of(alone, 4) == ranks | {"rollout-0": "cuda:2", "teacher-t-0": "cuda:3"}
    assert seat(alone, 4).shared() is None
    assert rollout_devices(one.rollout, seat(one, 4), ["4", "5", "6", "7"]) == ["6"]
    assert not rollout_devices(one.rollout, seat(one, 0), []), "on CPUs no GPU is named"
    on_cpus = one.model_copy(update={"student": one.student.model_copy(update={"device": "cpu"})})
    assert ROLLOUT not in seat(on_cpus, 4).claims


def test_plan_draws_the_seed_scenario_and_names_shared_gpus(
    quickstart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = quickstart[1]
    assert main(["plan", str(SEED), rows, "--gpus", "4"]) == 0
    output = capsys.readouterr().out
    assert "0 student/0 │ 1 student/1 │ 2 rollout/0 │ 3 teacher-add/0 + teacher-sort/0 │" in output
    assert "GPU 3: teacher-add/0 + teacher-sort/0. For GPUs of their own" in output
    assert main(["plan", str(SEED), rows, "--gpus", "5"]) == 0
    output = capsys.readouterr().out
    assert "3 teacher-add/0 │ 4 teacher-sort/0 │" in output and "shared" not in output


def test_a_gpu_named_for_an_engine_is_not_given_to_a_teacher_while_another_is_free() -> None:
    two = {"t": {"model": "org/t", "replicas": 2}}
    one = recipe(two, rollout={"processes": 1, "devices": ["1"]})
    assert seats_of(one, 4) == {
        "trainer": "cuda:0",
        "rollout-0": "cuda:1",
        "teacher-t-0": "cuda:2",
        "teacher-t-1": "cuda:3",
    }
    # If the recipe names a GPU twice, both roles sit there, and the plan reports it.
    both = recipe({"t": {"model": "org/t", "device": "cuda:1"}}, rollout={"processes": 1, "devices": ["1"]})
    assert "GPU 1: rollout/0 + teacher-t/0." in (seat(both, 4).shared() or "")
    # The trainer's own process is always on the first GPU.
    first = recipe(two, rollout={"processes": 1, "devices": ["0"]})
    assert seat(first, 4).gpus(STUDENT, 0) == [0] and "GPU 0: student/0 + rollout/0" in (
        seat(first, 4).shared() or ""
    )
    # The names are those of CUDA_VISIBLE_DEVICES, which may omit GPUs.
    named = recipe(two, rollout={"processes": 1, "devices": ["5"]})
    assert seats_of(named, 4, ["4", "5", "6", "7"])["rollout-0"] == "cuda:1"
    assert seats_of(named, 4, ["0", "1", "2", "6"])["rollout-0"] == "5", "a GPU that no other role sees"
    with pytest.raises(ClusterError, match=r"rollout\.devices names GPU 5; this machine has 4 GPUs"):
        seat(named, 4)
    # The recipe names a GPU of a pool.
    pool = {"pools": {"scoring": {"gpus_per_node": 2}}}
    pooled = {"t": {"model": "org/t", "placement": "pool", "pool": "scoring", "replicas": 2}}
    taken = seat(recipe(pooled, cluster=pool, rollout={"processes": 1, "devices": ["3"]}), 4)
    assert "GPU 3: teacher-t/1 + rollout/0." in (taken.shared() or "")


def test_engines_without_a_gpu_of_their_own_sit_with_the_student() -> None:
    cluster = {
        "pools": {"train": {"gpus_per_node": 2}, "scoring": {"gpus_per_node": 2}},
        "roles": {"student": "train"},
    }
    pooled = {"t": {"model": "org/t", "placement": "pool", "pool": "scoring", "replicas": 2}}
    one = recipe(pooled, cluster=cluster, trainer={"ranks": 2}, rollout={"processes": 1})
    assert seats_of(one, 4)["rollout-0"] == "cuda:0"
    assert "GPU 0: student/0 + rollout/0." in (seat(one, 4).shared() or "")


@given(
    gpus=st.integers(1, 8),
    ranks=st.integers(1, 3),
    processes=st.integers(0, 3),
    by_hand=st.booleans(),
    teachers=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from(["auto", "cuda:1"])), max_size=3
    ),
)
def test_gpus_are_shared_only_when_too_few_and_every_shared_gpu_is_reported(
    gpus: int, ranks: int, processes: int, by_hand: bool, teachers: list[tuple[int, int, str]]
) -> None:
    named = {
        f"t{i}": {"model": "org/t", "key": f"k{i}", "replicas": n}
        | ({"tensor_parallel": width} if width > 1 else {"device": device})
        for i, (n, width, device) in enumerate(teachers)
    }
    rollout: dict[str, Any] = {"processes": processes}
    if by_hand and processes:
        rollout["devices"] = [str(i % gpus) for i in range(processes)]
    one = recipe(named or {"t": {"model": "org/t"}}, trainer={"ranks": ranks}, rollout=rollout)
    try:
        seating = seat(one, gpus)
    except ClusterError:
        return
    sits: dict[int, list[str]] = {}
    for found in seating.placement.seats:
        sits.setdefault(found.device, []).append(f"{found.role}/{found.unit}")
    planned = [name for name, device in seats_of(one, gpus).items() if "cuda" not in device]
    assert not planned, "a process has no GPU"
    assert [seating.gpus(STUDENT, rank) for rank in range(ranks)] == [[rank] for rank in range(ranks)]
    note = seating.shared() or ""
    assert {index for index, who in sits.items() if len(who) > 1} == {
        int(index) for index in re.findall(r"GPU (\d+):", note)
    }
    assert all(" + ".join(who) in note for who in sits.values() if len(who) > 1)
    wanted = sum(map(len, sits.values()))
    chosen_by_hand = by_hand or any(device != "auto" for _, width, device in teachers if width == 1)
    if wanted <= gpus and not chosen_by_hand:
        assert not note, "a GPU is shared although there are enough"
    if note and not chosen_by_hand:
        assert set(sits) == set(range(gpus)), "a GPU is shared while another is free"


@pytest.mark.parametrize(
    ("teacher", "cluster", "message"),
    [
        ({"placement": "pool"}, {}, "placement = 'pool' needs `pool`"),
        ({"pool": "p"}, {}, "belongs to placement = 'pool'"),
        (
            {"placement": "pool", "pool": "scorng"},
            {"pools": {"scoring": {"gpus_per_node": 1}}},
            "did you mean 'scoring'?",
        ),
        ({}, {"pools": {"p": {"nodes": 2, "gpus_per_node": 1}}}, "is this one machine; set nodes = 1"),
        ({}, {"pools": {"p": {}}}, "an empty pool"),
        ({}, {"roles": {"student": "p"}}, "cluster.roles.student = 'p' is not one of"),
        ({"replicas": 0}, {}, "at least 1 replica"),
        ({"placement": "colocate"}, {}, "slept and woken"),
        ({"device": "cuda:0", "tensor_parallel": 2}, {}, "needs that many devices"),
        ({"backend": "openai"}, {}, "belongs to placement = 'external'"),
        ({"placement": "external", "urls": ["host:80"]}, {}, "expected an address like"),
        (
            {"placement": "external", "urls": ["http://h"], "compile": True},
            {},
            "`compile` belongs to processes",
        ),
        ({"trust_remote_code": True}, {}, "pin it with `revision`"),
    ],
)
def test_contradicting_teacher_and_cluster_settings_are_refused(
    teacher: dict[str, Any], cluster: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        recipe({"t": {"model": "org/t", **teacher}}, cluster=cluster)


def test_roles_without_processes_are_refused() -> None:
    with pytest.raises(ClusterError, match="`rollout` has no processes of its own"):
        seat(recipe(cluster={"pools": {"p": {"gpus_per_node": 1}}, "roles": {"rollout": "p"}}), None)


def test_planned_processes_name_the_device_of_each_rank() -> None:
    one = recipe(**POOLED)
    planned = {process.name: process.device for process in plan_processes(one, seat(one, 6))}
    assert planned == {
        "trainer": "cuda:0",
        "rank-1": "cuda:1",
        "teacher-math-0": "cuda:2",
        "teacher-math-0-rank1": "cuda:3",
        "teacher-math-1": "cuda:4",
        "teacher-math-1-rank1": "cuda:5",
        "teacher-code-0": "external",
    }


class RecordingProcesses(LocalProcesses):
    """Starts nothing and records what it was started to start."""

    def __init__(self) -> None:
        self.started: dict[str, tuple[list[str], dict[str, str]]] = {}

    async def start(self, name: str, module: str, arguments: Any, env: Any = None) -> Child:
        self.started[name] = (list(arguments), dict(env))
        return Child(name, None, Path(), {"url": f"http://{name}"})  # type: ignore[arg-type]

    async def stop(self, name: str) -> None:
        pass


def test_each_replica_process_is_started_with_its_gpus_and_its_settings() -> None:
    changes = {
        "revision": "abc",
        "attention": "eager",
        "compile": True,
        "context_length": 512,
        "replicas": 2,
        "tensor_parallel": 2,
    }
    one = recipe({"t": {"model": "org/t", **changes}})
    processes = RecordingProcesses()
    seats = Seats(seat(one, 7), ["10", "11", "12", "13", "14", "15", "16"])
    teachers = LocalTeachers(processes, "t", one.teachers["t"], "by_request", "secret", seats)
    endpoint = asyncio.run(teachers.start("1"))
    assert endpoint.url == "http://teacher-t-1" and "secret" not in repr(endpoint)
    for rank, name in enumerate(("teacher-t-1", "teacher-t-1-rank1")):
        arguments, env = processes.started[name]
        assert env["CUDA_VISIBLE_DEVICES"] == "13,14" and env["UNDERSTUDY_TOKEN"] == "secret"
        for option, value in {
            "--device": f"cuda:{rank}",
            "--rank": str(rank),
            "--world-size": "2",
            "--revision": "abc",
            "--attention": "eager",
            "--max-length": "512",
        }.items():
            assert arguments[arguments.index(option) + 1] == value
        assert "--compile" in arguments and "secret" not in " ".join(arguments)
    asyncio.run(teachers.start("2"))  # a replica that joins later sits on free GPUs
    assert processes.started["teacher-t-2"][1]["CUDA_VISIBLE_DEVICES"] == "15,16"
    with pytest.raises(ClusterError, match="no room for teacher-t/3"):
        asyncio.run(teachers.start("3"))
    teachers.forget("1")
    asyncio.run(teachers.start("3"))
    assert processes.started["teacher-t-3"][1]["CUDA_VISIBLE_DEVICES"] == "13,14"
