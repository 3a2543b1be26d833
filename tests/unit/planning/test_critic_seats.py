"""Where a critic sits: the settings that a recipe may have, the device it gets, and what `plan` shows."""

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from understudy.cli.main import main
from understudy.cluster.ray_layout import Bundle, NodeFacts, UnitBundle
from understudy.config import Recipe, parse_recipe
from understudy.errors import ClusterError, ConfigError
from understudy.planning.processes import plan_processes
from understudy.planning.ray_seating import beside_the_trainer, ray_layout
from understudy.planning.seating import CRITIC, STUDENT, critic_device, critic_sits_apart, seat

QUICKSTART = Path(str(resources.files("understudy.assets") / "quickstart" / "recipe.toml"))
NODES = [NodeFacts("a", Bundle(8), Bundle(8), True), NodeFacts("b", Bundle(8), Bundle(8))]
POOL = {"pools": {"values": {"gpus_per_node": 1}}, "roles": {"critic": "values"}}


def recipe(**sections: Any) -> Recipe:
    """A recipe of PPO on rewards, without teachers."""
    table: dict[str, Any] = {
        "student": {"model": "org/student"},
        "data": {"train": "x.jsonl", "reward": "m:f"},
        "loss": {"task_coef": 1.0, "distill_coef": 0.0, "advantage": "gae"},
    }
    return parse_recipe({**table, **sections})


def on_ray(**pool: int) -> dict[str, Any]:
    return {"backend": "ray", "pools": {"values": pool}, "roles": {"critic": "values"}}


def test_the_critic_sits_in_the_trainers_process_unless_the_recipe_sets_a_process_or_a_pool() -> None:
    for one in (recipe(), recipe(critic={"learning_rate": 1e-3})):
        assert not critic_sits_apart(one) and CRITIC not in seat(one, 4).claims
        assert [process.name for process in plan_processes(one, seat(one, 4))] == ["trainer"]
    assert critic_sits_apart(recipe(critic={"process": True}))
    assert critic_sits_apart(recipe(cluster=POOL)), "a pool means a process"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cluster": POOL}, r"cluster\.roles\.critic = 'values' changes nothing .* needs loss\.advantage = 'gae'"),
        ({"critic": {"process": True}}, r"\[critic\] is only used by loss\.advantage = 'gae'"),
    ],
)  # fmt: skip
def test_a_pool_or_process_for_the_critic_is_refused_without_the_gae_advantage(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        recipe(loss={"task_coef": 1.0, "distill_coef": 0.0}, rollout={"n": 2}, **sections)
    assert len(caught.value.problems) == 1


def test_critic_device_needs_a_critic_process_and_defaults_to_the_students_device() -> None:
    with pytest.raises(ConfigError, match=r"critic\.device = 'cuda:1' .* set critic\.process = true"):
        recipe(critic={"device": "cuda:1"})
    assert critic_device(recipe(critic={"device": "cuda:1", "process": True})) == "cuda:1"
    assert critic_device(recipe(critic={"device": "cpu"}, cluster=POOL)) == "cpu"
    on_cpu = recipe(student={"model": "org/student", "device": "cpu"}, critic={"process": True})
    assert critic_device(on_cpu) == "cpu", "the student's device, if the recipe sets it"
    assert critic_device(recipe(critic={"process": True})) == "auto"
    with pytest.raises(ConfigError, match="did you mean 'values'"):
        recipe(cluster={**POOL, "roles": {"critic": "valus"}})


def test_a_critic_process_gets_its_own_gpu_if_the_machine_has_enough() -> None:
    one = recipe(critic={"process": True}, trainer={"ranks": 2})
    seating = seat(one, 3)
    assert [seating.gpus(STUDENT, rank) for rank in range(2)] == [[0], [1]] and seating.gpus(CRITIC, 0) == [2]
    assert {process.name: process.device for process in plan_processes(one, seating)}["critic"] == "cuda:2"
    with pytest.raises(ClusterError, match=r"critic 1 × 1 = 3: 1 too many[\s\S]*to share one on purpose"):
        seat(one, 2)
    alone = recipe(critic={"process": True})
    assert seat(alone, 1).gpus(CRITIC, 0) == [0] and seat(alone, 0).gpus(CRITIC, 0) == []
    assert "0 student/0 + critic/0" in seat(alone, 1).placement.drawing()
    by_hand = recipe(critic={"process": True, "device": "cuda:0"})
    assert seat(by_hand, 4).gpus(CRITIC, 0) == [0], "the GPU that the recipe names, shared or not"
    with pytest.raises(ClusterError, match="this machine has 4 GPUs"):
        seat(recipe(critic={"process": True, "device": "cuda:9"}), 4)
    with pytest.raises(ClusterError, match=r"critic\.device = 'cuda': this machine has no GPU"):
        seat(recipe(critic={"process": True, "device": "cuda"}), 0)


def test_a_critics_pool_is_a_slice_of_this_machine_after_the_students_gpus() -> None:
    seating = seat(recipe(cluster=POOL), 2)
    assert seating.gpus(STUDENT, 0) == [0] and seating.gpus(CRITIC, 0) == [1], "the student comes first"
    cpus = {"pools": {"values": {"cpus_per_node": 4}}, "roles": {"critic": "values"}}
    threads = seat(recipe(cluster=cpus, run={"threads": 3}), 1)
    assert threads.claims[CRITIC].world_size == 3, "one CPU per thread"
    assert threads.gpus(CRITIC, 0) == []
    with pytest.raises(ClusterError, match=r"critic\.device = 'cuda': pool values has no GPUs"):
        seat(recipe(cluster=cpus, critic={"device": "cuda"}), 1)
    with pytest.raises(ClusterError, match="a unit of 6 CPUs would end inside a node of pool values"):
        seat(recipe(cluster=cpus, run={"threads": 6}), 1)


def test_on_ray_the_critic_sits_in_a_bundle_of_its_pool() -> None:
    one = recipe(cluster=on_ray(nodes=1, cpus_per_node=2), run={"threads": 2})
    layout = ray_layout(one, NODES)
    assert layout.units == {"critic": UnitBundle("pool values", 0, Bundle(2))}
    assert layout.groups["pool values"].bundles == (Bundle(2),)
    gpu = recipe(cluster=on_ray(nodes=1, gpus_per_node=1), critic={"process": True})
    assert ray_layout(gpu, NODES).units["critic"].share == Bundle(0, 1)
    here = beside_the_trainer(gpu)
    assert not critic_sits_apart(here), "it takes nothing of the trainer's machine"
    beside = recipe(cluster={"backend": "ray"}, critic={"process": True})
    assert not ray_layout(beside, NODES).units and critic_sits_apart(beside_the_trainer(beside))
    wide = recipe(cluster=on_ray(nodes=2, cpus_per_node=2), run={"threads": 4})
    with pytest.raises(ClusterError, match=r"critic/0 sits on several machines; lower run\.threads"):
        ray_layout(wide, NODES)


def test_plan_shows_the_critic_with_its_pool_and_its_memory(
    quickstart: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["loss.task_coef=1.0", "loss.advantage=gae", "run.threads=1", "cluster.backend=ray"]
    pool = [
        "cluster.pools.values.nodes=1",
        "cluster.pools.values.cpus_per_node=2",
        "cluster.roles.critic=values",
    ]
    assert main(["plan", *quickstart, *arguments, *pool]) == 0
    drawn = capsys.readouterr().out
    assert "node 0 │ 0 critic/0 │ 1 free │" in drawn
    assert "on Ray, pool values: 1 × (2 CPU) on machines of their own" in drawn
    (row,) = [line for line in drawn.splitlines() if "its own updates" in line]
    assert "critic" in row and "values node 0, cpu" in row


def test_the_trainers_planned_memory_excludes_a_critic_with_its_own_process() -> None:
    student = {"model": str(QUICKSTART.parent / "models" / "student"), "device": "cpu"}
    inside, outside = (recipe(student=student, critic={"process": process}) for process in (False, True))
    (whole,) = plan_processes(inside, seat(inside, 0))
    trainer, critic = plan_processes(outside, seat(outside, 0))
    assert whole.bytes and trainer.bytes and critic.bytes and critic.parameters
    assert whole.bytes - trainer.bytes == 16 * critic.parameters < critic.bytes
