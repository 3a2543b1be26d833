"""A recipe that asks for devices a machine does not have is refused by `plan` and `train`, before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from understudy.cli.main import main
from understudy.config import Recipe, parse_recipe
from understudy.errors import ClusterError, ConfigError
from understudy.planning.ray_seating import beside_the_trainer
from understudy.planning.seating import STUDENT, seat


def recipe(teacher: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    table = {
        "student": {"model": "org/s"},
        "teachers": {"t": {"model": "org/t", **(teacher or {})}},
        "data": {"train": "x.jsonl"},
    }
    return parse_recipe(table | sections)


def student(device: str) -> dict[str, str]:
    return {"model": "org/s", "device": device}


@pytest.mark.parametrize("device", ["tpu", "cuda:a", "cuda:-1", "cuda:01", "CUDA", "gpu", "", "mps"])
def test_an_unknown_device_is_refused_by_the_recipe(device: str) -> None:
    expected = f"{device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'"
    with pytest.raises(ConfigError) as caught:
        recipe({"device": device}, student=student(device))
    assert f"`student.device` = {expected}" in str(caught.value)
    assert f"`teachers.t.device` = {expected}" in str(caught.value)


@pytest.mark.parametrize("devices", ["cuda:1", "", "1,", "one"])
def test_rollout_devices_must_be_named_as_in_cuda_visible_devices(devices: str) -> None:
    with pytest.raises(
        ConfigError, match=r"`rollout.devices\[0\]` = .*expected GPUs as CUDA_VISIBLE_DEVICES"
    ):
        recipe(rollout={"processes": 1, "devices": [devices]})
    for fine in ("0", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-GPU-8932f937/1/2"):
        assert recipe(rollout={"processes": 1, "devices": [fine]}).rollout.devices == [fine]


@pytest.mark.parametrize(
    ("gpus", "one", "message"),
    [
        (0, recipe(student=student("cuda")), "student.device = 'cuda': this machine has no GPU; set 'cpu'"),
        (0, recipe(student=student("cuda:3")), "student.device = 'cuda:3': this machine has no GPU"),
        (0, recipe({"device": "cuda"}), "teachers.t.device = 'cuda': this machine has no GPU"),
        (
            0,
            recipe(student=student("cuda"), trainer={"ranks": 4}),
            "trainer.ranks = 4 .*this machine has no GPU",
        ),
        (1, recipe(trainer={"ranks": 4}), "trainer.ranks = 4 .*takes a GPU of its own, and .* has 1 GPU"),
        (2, recipe(student=student("cuda"), trainer={"ranks": 4}), "trainer.ranks = 4 .* has 2 GPUs"),
        (1, recipe(student=student("cuda:1")), "device = 'cuda:1'; this machine has 1 GPU"),
        (0, recipe(rollout={"processes": 1, "devices": ["0"]}), "rollout.devices names 1 GPU, and .* no GPU"),
        (1, recipe(rollout={"processes": 2, "devices": ["0", "1"]}), "names 2 GPUs, and .* has 1 GPU"),
        (0, recipe(cluster={"pools": {"p": {"cpus_per_node": 9999}}}), r"ask for 9999 CPUs \(p 9999\)"),
    ],
)
def test_a_recipe_that_needs_more_devices_than_the_machine_has_is_refused_with_both_numbers(
    gpus: int, one: Recipe, message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        seat(one, gpus, cpus=8)
    seat(one, 8, cpus=9999)


def test_a_recipe_that_asks_for_no_gpu_is_seated_on_a_machine_without_one() -> None:
    for fine in (
        recipe(trainer={"ranks": 4}),
        recipe({"device": "cpu", "tensor_parallel": 2}, student=student("cpu")),
    ):
        assert seat(fine, 0).gpus(STUDENT, 0) == []
    assert seat(recipe({"device": "cpu"}, student=student("cpu"), trainer={"ranks": 4}), 1).claims == {}
    external = {"placement": "external", "urls": ["http://h:1"]}
    assert seat(recipe(external), 0).claims == {}


def test_on_ray_only_roles_on_the_trainers_machine_are_checked_against_its_gpus() -> None:
    pools = {"nodes": 2, "gpus_per_node": 4}
    cluster = {"backend": "ray", "pools": {"scoring": pools}}
    pooled = recipe({"placement": "pool", "pool": "scoring", "device": "cuda"}, cluster=cluster)
    assert seat(beside_the_trainer(pooled), 0).claims == {}
    here = recipe(student=student("cuda"), cluster={"backend": "ray"})
    with pytest.raises(ClusterError, match=r"student\.device = 'cuda': this machine has no GPU"):
        seat(beside_the_trainer(here), 0)


def test_a_pool_on_ray_must_set_its_number_of_nodes() -> None:
    with pytest.raises(
        ConfigError, match=r"cluster\.pools\.p\.nodes is missing: .* machines of the Ray cluster"
    ):
        recipe(cluster={"backend": "ray", "pools": {"p": {"gpus_per_node": 4}}})
    recipe(cluster={"pools": {"p": {"gpus_per_node": 4}}})  # on one machine the number is known


@pytest.mark.parametrize(
    ("teacher", "sections", "message"),
    [
        ({"placement": "pool", "pool": "p", "device": "cuda"}, {}, "teachers.t.device = 'cuda': pool p has no GPUs"),
        ({}, {"student": student("cuda"), "roles": {"student": "p"}}, "student.device = 'cuda': pool p has no"),
        (
            {},
            {"student": student("cuda"), "rollout": {"processes": 1}, "roles": {"rollout": "p"}},
            "rollout.processes sit on student.device, which is 'cuda': pool p",
        ),
    ],
)  # fmt: skip
def test_a_role_on_cuda_in_a_pool_without_gpus_is_refused_instead_of_moved_to_a_cpu(
    teacher: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    cluster = {"pools": {"p": {"cpus_per_node": 4}}, "roles": sections.pop("roles", {})}
    with pytest.raises(ClusterError, match=message):
        seat(recipe(teacher, cluster=cluster, **sections), None)


def test_plan_and_train_refuse_a_missing_gpu_and_create_no_run_directory(
    quickstart: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = [*quickstart, "student.device=cuda", f"run.dir={tmp_path / 'never'}"]
    for command in ("plan", "train"):
        assert main([command, *arguments]) == 2
        output = capsys.readouterr().err
        assert "student.device = 'cuda': this machine has no GPU" in output and "unexpected" not in output
        assert ("--gpus N" in output) == (command == "plan")
    assert not (tmp_path / "never").exists()
    assert main(["plan", *arguments, "--gpus", "5"]) == 0
    assert "pool machine: 1 node × 5 GPUs" in capsys.readouterr().out
    assert main(["check", *arguments]) == 0, "a recipe for another machine is sound"


def test_the_error_says_whether_gpus_are_missing_or_torch_cannot_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from understudy.assembly.this_machine import gpu_names
    from understudy.planning.this_machine import seat_here

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ClusterError, match=r"has no GPU[\s\S]*there are 2 GPUs, and torch .* can use none"):
        seat_here(recipe(student=student("cuda")), gpu_names())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ClusterError) as caught:
        seat_here(recipe(student=student("cuda")), gpu_names())
    assert "torch" not in str(caught.value)
