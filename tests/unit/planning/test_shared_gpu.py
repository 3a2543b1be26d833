"""`sharing` names the processes that share a GPU."""

import pytest

from understudy.config import Recipe, parse_recipe
from understudy.planning.seating import seat
from understudy.planning.shared_gpu import sharing


def recipe(device: str = "auto", student: str = "auto") -> Recipe:
    return parse_recipe(
        {
            "student": {"model": "org/student", "device": student},
            "teachers": {"math": {"model": "org/math", "device": device, "replicas": 1}},
            "data": {"train": "x.jsonl"},
        }
    )


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1), ("cuda:0", 2)])
def test_processes_on_one_gpu_share_it(device: str, gpus: int) -> None:
    assert sharing(seat(recipe(device, device), gpus).placement) == "student and teacher-math"


@pytest.mark.parametrize(("device", "gpus"), [("auto", 2), ("auto", 0), ("cpu", 1)])
def test_processes_on_different_gpus_or_without_one_share_none(device: str, gpus: int) -> None:
    assert sharing(seat(recipe(device), gpus).placement) is None
