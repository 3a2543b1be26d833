"""From a recipe to seats on this machine, and from seats to what each replica process is told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from understudy.cluster.local import Child, LocalProcesses
from understudy.config import Recipe, parse_recipe
from understudy.errors import ClusterError, ConfigError
from understudy.trainers.plan import plan_processes
from understudy.trainers.seating import ROLLOUT, STUDENT, Seats, seat, with_rollout_devices
from understudy.trainers.teacher_processes import LocalTeachers


def recipe(teachers: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    named = teachers or {"math": {"model": "org/math", "key": "m"}, "code": {"model": "org/code", "key": "c"}}
    return parse_recipe(
        {"student": {"model": "org/student"}, "teachers": named, "data": {"train": "x.jsonl"}, **sections}
    )


def test_standalone_teachers_have_gpus_of_their_own() -> None:
    seating = seat(recipe(), 4)
    assert seating.gpus(STUDENT, 0) == [0]
    assert (seating.gpus("teacher-math", 0), seating.gpus("teacher-code", 0)) == ([1], [2])
    with pytest.raises(ClusterError, match=r"= 3: 1 too many[\s\S]*to share one on purpose"):
        seat(recipe(), 2)


def test_one_gpu_is_shared_by_all() -> None:
    seating = seat(recipe(), 1)
    assert (
        seating.gpus(STUDENT, 0) == seating.gpus("teacher-math", 0) == seating.gpus("teacher-code", 0) == [0]
    )
    assert "0 student/0 + teacher-math/0 + teacher-code/0" in seating.placement.drawing()


def test_no_gpu_no_seats() -> None:
    seating = seat(recipe(), 0)
    assert not seating.placement.pools and seating.gpus(STUDENT, 0) == []


def test_a_device_chosen_by_hand_is_left_alone_by_the_others() -> None:
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
            "pool": "judges",
            "replicas": 2,
            "tensor_parallel": 2,
        },
        "code": {"model": "org/c", "key": "c", "placement": "external", "urls": ["http://elsewhere:8000"]},
    },
    "cluster": {
        "pools": {"judges": {"gpus_per_node": 4}, "train": {"gpus_per_node": 2}},
        "roles": {"student": "train"},
    },
    "trainer": {"ranks": 2},
}


def test_pools_are_slices_of_the_machine_and_the_students_comes_first() -> None:
    seating = seat(recipe(**POOLED), 6)
    assert [seating.gpus(STUDENT, rank) for rank in range(2)] == [[0], [1]]
    assert [seating.gpus("teacher-math", unit) for unit in range(2)] == [[2, 3], [4, 5]]
    with pytest.raises(ClusterError, match=r"ask for 6 GPUs \(judges 4 \+ train 2\); this machine has 5"):
        seat(recipe(**POOLED), 5)
    assert seat(recipe(**POOLED), None).claims.keys() == {STUDENT, "teacher-math"}


def test_rollout_servers_get_gpus_as_vllm_is_cut() -> None:
    rollout = {"engine": "vllm", "replicas": 2, "engine_args": ["--tensor-parallel-size=2"]}
    one = recipe({"t": {"model": "org/t"}}, rollout=rollout)
    seating = seat(one, 6)
    names = ["g0", "g1", "g2", "g3", "g4", "g5"]
    assert with_rollout_devices(one, seating, names).rollout.devices == ["g1,g2", "g3,g4"]
    assert seating.gpus("teacher-t", 0) == [5] and seating.claims[ROLLOUT].world_size == 2
    by_hand = recipe({"t": {"model": "org/t"}}, rollout={"engine": "vllm", "devices": ["1"]})
    assert with_rollout_devices(by_hand, seat(by_hand, 3), names) is by_hand
    assert seat(by_hand, 3).gpus("teacher-t", 0) == [2]


@pytest.mark.parametrize(
    ("teacher", "cluster", "told"),
    [
        ({"placement": "pool"}, {}, "placement = 'pool' needs `pool`"),
        ({"pool": "p"}, {}, "belongs to placement = 'pool'"),
        (
            {"placement": "pool", "pool": "juges"},
            {"pools": {"judges": {"gpus_per_node": 1}}},
            "did you mean 'judges'?",
        ),
        ({}, {"pools": {"p": {"nodes": 2, "gpus_per_node": 1}}}, "is this one machine; set nodes = 1"),
        ({}, {"pools": {"p": {}}}, "an empty pool"),
        ({}, {"roles": {"student": "p"}}, "cluster.roles.student = 'p' is none of"),
        ({"replicas": 0}, {}, "at least 1 replica"),
        ({"placement": "colocate"}, {}, "slept and woken"),
        ({"device": "cuda:0", "tensor_parallel": 2}, {}, "needs that many devices"),
        ({"backend": "vllm"}, {}, "belongs to placement = 'external'"),
        ({"placement": "external", "urls": ["host:80"]}, {}, "expected an address like"),
        (
            {"placement": "external", "urls": ["http://h"], "compile": True},
            {},
            "`compile` belongs to processes",
        ),
        ({"trust_remote_code": True}, {}, "pin it with `revision`"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_recipe(
    teacher: dict[str, Any], cluster: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        recipe({"t": {"model": "org/t", **teacher}}, cluster=cluster)


def test_roles_without_processes_are_refused() -> None:
    with pytest.raises(ClusterError, match="`rollout` has no processes of its own"):
        seat(recipe(cluster={"pools": {"p": {"gpus_per_node": 1}}, "roles": {"rollout": "p"}}), None)


def test_the_plan_names_devices_and_ranks() -> None:
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


class Remembering(LocalProcesses):
    """Starts nothing; remembers what it was asked to start."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[list[str], dict[str, str]]] = {}

    async def start(self, name: str, module: str, arguments: Any, env: Any = None) -> Child:
        self.asked[name] = (list(arguments), dict(env))
        return Child(name, None, Path(), {"url": f"http://{name}"})  # type: ignore[arg-type]

    async def stop(self, name: str) -> None:
        pass


def test_each_replica_is_told_its_gpus() -> None:
    changes = {"revision": "abc", "compile": True, "context_length": 512, "replicas": 2, "tensor_parallel": 2}
    one = recipe({"t": {"model": "org/t", **changes}})
    processes = Remembering()
    seats = Seats(seat(one, 7), ["10", "11", "12", "13", "14", "15", "16"])
    teachers = LocalTeachers(processes, "t", one.teachers["t"], "by_request", "secret", seats)
    endpoint = asyncio.run(teachers.start("1"))
    assert endpoint.url == "http://teacher-t-1" and "secret" not in repr(endpoint)
    for rank, name in enumerate(("teacher-t-1", "teacher-t-1-rank1")):
        arguments, env = processes.asked[name]
        assert env["CUDA_VISIBLE_DEVICES"] == "13,14" and env["UNDERSTUDY_TOKEN"] == "secret"
        for option, value in {
            "--device": f"cuda:{rank}",
            "--rank": str(rank),
            "--world-size": "2",
            "--revision": "abc",
            "--max-length": "512",
        }.items():
            assert arguments[arguments.index(option) + 1] == value
        assert "--compile" in arguments and "secret" not in " ".join(arguments)
    asyncio.run(teachers.start("2"))  # one that joins later sits on what is free
    assert processes.asked["teacher-t-2"][1]["CUDA_VISIBLE_DEVICES"] == "15,16"
    with pytest.raises(ClusterError, match="no room for teacher-t/3"):
        asyncio.run(teachers.start("3"))
    teachers.forget("1")
    asyncio.run(teachers.start("3"))
    assert processes.asked["teacher-t-3"][1]["CUDA_VISIBLE_DEVICES"] == "13,14"
