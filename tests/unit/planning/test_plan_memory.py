"""Memory that `understudy plan` reports: compared with the bytes of real optimizers, and listed by machine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from understudy.cli.main import main
from understudy.config import Recipe, parse_recipe
from understudy.planning.models.folder import ModelFolder
from understudy.planning.processes import plan_processes, student_bytes
from understudy.planning.seating import seat
from understudy.policy.lora import LoraSettings, add_lora
from understudy.policy.optim.adamw import AdamWSettings, MasterAdamW
from understudy.policy.optim.ema import WeightAverage

ASSETS = Path(__file__).parents[3] / "src/understudy/assets/quickstart"
STUDENT = ASSETS / "models/student"


def recipe(*, model: str = str(STUDENT), **sections: Any) -> Recipe:
    student = {"model": model, **sections.pop("student", {})}
    table = {"student": student, "teachers": {"t": {"model": "org/t"}}, "data": {"train": "x.jsonl"}}
    return parse_recipe(table | sections)


def measured_bytes(one: Recipe) -> int:
    """Bytes of weights, masters, gradients, moments and averages of a student in the middle of a step."""
    trainer, lora = one.trainer, one.student.lora
    model = AutoModelForCausalLM.from_pretrained(STUDENT, dtype=getattr(torch, one.student.dtype))
    if lora is not None:
        add_lora(model, LoraSettings(lora.rank, lora.alpha, tuple(lora.targets)))
    settings = AdamWSettings(kind=trainer.optimizer, offload=trainer.offload_optimizer)
    optimizer = MasterAdamW(model.named_parameters(), settings)
    average = WeightAverage(optimizer.masters, trainer.ema_decay) if trainer.ema_decay else None
    model(input_ids=torch.arange(8)[None]).logits.float().square().mean().backward()
    tensors = [master.grad for master in optimizer.masters.values() if master.grad is not None]
    optimizer.step(1e-3, optimizer.grad_norm())
    tensors += [*model.parameters(), *optimizer.masters.values()]
    tensors += [value for state in optimizer.adamw.state.values() for value in state.values()]
    tensors += list(average.values.values()) if average else []
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"student": {"dtype": "bfloat16"}},
        {"trainer": {"optimizer": "adamw_8bit"}},
        {"trainer": {"ema_decay": 0.9}},
        {"student": {"dtype": "bfloat16"}, "trainer": {"offload_optimizer": True}},
        {"trainer": {"offload_optimizer": True, "optimizer": "adamw_8bit", "ema_decay": 0.9}},
        {"student": {"lora": {"rank": 4}}},
        {"student": {"dtype": "bfloat16", "lora": {"rank": 8, "targets": ["q_proj", "down_proj"]}}},
    ],
)
def test_planned_student_bytes_equal_those_of_a_real_optimizer(sections: dict[str, Any]) -> None:
    one = recipe(**sections)
    parameters = ModelFolder.open(str(STUDENT), "student.model").parameters
    assert sum(student_bytes(one, parameters)) == pytest.approx(measured_bytes(one), rel=0.02)


def test_an_offloaded_optimizer_counts_as_host_memory_with_a_gpu_and_as_device_memory_on_a_cpu() -> None:
    one = recipe(student={"dtype": "bfloat16"}, trainer={"offload_optimizer": True})
    parameters = ModelFolder.open(str(STUDENT), "student.model").parameters
    on_gpu, on_cpu = (plan_processes(one, seat(one, gpus))[0] for gpus in (2, 0))
    assert on_gpu.host_bytes == 16 * parameters and on_cpu.host_bytes == 0
    assert on_gpu.bytes is not None and on_cpu.bytes == on_gpu.bytes + on_gpu.host_bytes
    two = recipe(student={"dtype": "bfloat16"}, trainer={"offload_optimizer": True, "ranks": 2})
    ranks = plan_processes(two, seat(two, 3))[:2]
    assert [rank.host_bytes for rank in ranks] == [8 * parameters] * 2, (
        "each rank holds the moments of its shard"
    )
    assert (
        ranks[1].bytes is not None and ranks[1].bytes - 4 * parameters // 2 == on_gpu.bytes - 2 * parameters
    )


def test_with_several_ranks_the_frozen_base_of_adapters_is_planned_in_float32() -> None:
    one, two = (
        recipe(student={"dtype": "bfloat16", "lora": {"rank": 4}}, trainer={"ranks": ranks})
        for ranks in (1, 2)
    )
    parameters = ModelFolder.open(str(STUDENT), "student.model").parameters
    assert student_bytes(two, parameters)[0] - student_bytes(one, parameters)[0] == 2 * parameters


def test_planned_bytes_of_a_critic_are_smaller_with_8_bit_moments() -> None:
    plain, packed = (
        recipe(
            critic={"process": True},
            loss={"task_coef": 1.0, "advantage": "gae"},
            data={"train": "t.jsonl", "reward": "understudy.rollout.rewards.builtin:exact_match"},
            trainer={"optimizer": optimizer},
        )
        for optimizer in ("adamw", "adamw_8bit")
    )
    parameters = ModelFolder.open(str(STUDENT), "student.model").parameters
    found = [
        next(process.bytes for process in plan_processes(one, seat(one, None)) if process.name == "critic")
        for one in (plain, packed)
    ]
    assert found[0] is not None and found[1] is not None
    assert found[0] - found[1] == pytest.approx(6 * parameters, rel=0.02)


def test_planned_processes_on_ray_name_their_pool_node_and_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {
        "backend": "ray",
        "pools": {"scoring": {"nodes": 2, "gpus_per_node": 2}, "write": {"nodes": 2, "gpus_per_node": 1, "cpus_per_node": 1}},
        "roles": {"rollout": "write", "workers": "write"},
    }  # fmt: skip
    teacher = {"model": "org/t", "placement": "pool", "pool": "scoring", "replicas": 2, "tensor_parallel": 2}
    one = recipe(cluster=cluster, teachers={"t": teacher}, rollout={"processes": 2, "workers": 2})
    planned = {process.name: process.device for process in plan_processes(one, seat(one, None))}
    assert planned == {
        "trainer": "auto",
        "rollout-0": "write node 0, cuda:0",
        "rollout-1": "write node 1, cuda:0",
        "rollout-worker-0": "write node 0, cpu",
        "rollout-worker-1": "write node 1, cpu",
        "teacher-t-0": "scoring node 0, cuda:0",
        "teacher-t-0-rank1": "scoring node 0, cuda:1",
        "teacher-t-1": "scoring node 1, cuda:0",
        "teacher-t-1-rank1": "scoring node 1, cuda:1",
    }


def test_plan_shows_the_host_memory_of_an_offloaded_optimizer(
    quickstart: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["trainer.offload_optimizer=true", "--gpus", "5"]
    assert main(["plan", *quickstart, *arguments]) == 0
    assert "GiB of the host" in capsys.readouterr().out
