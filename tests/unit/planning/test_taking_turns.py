"""Who shares a GPU is told what lets them work side by side, unless it is there."""

from pathlib import Path

import pytest

from understudy.config import Recipe, parse_recipe
from understudy.planning.seating import seat
from understudy.planning.shared_gpu import advice


def recipe(device: str = "auto", student: str = "auto") -> Recipe:
    return parse_recipe(
        {
            "student": {"model": "org/student", "device": student},
            "teachers": {"math": {"model": "org/math", "device": device, "replicas": 1}},
            "data": {"train": "x.jsonl"},
        }
    )


@pytest.fixture(autouse=True)
def pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1), ("cuda:0", 2)])
def test_processes_on_one_gpu_are_told_what_to_start(device: str, gpus: int) -> None:
    words = advice(seat(recipe(device, device), gpus).placement)
    assert words is not None
    assert words.startswith("student and teacher-math share a GPU") and "nvidia-cuda-mps-control -d" in words


@pytest.mark.parametrize(("device", "gpus"), [("auto", 2), ("auto", 0), ("cpu", 1)])
def test_who_has_a_gpu_alone_is_told_nothing(device: str, gpus: int) -> None:
    assert advice(seat(recipe(device), gpus).placement) is None


def test_nor_is_anybody_where_the_service_is_there(pipes: Path) -> None:
    (pipes / "control").touch()
    assert advice(seat(recipe(), 1).placement) is None
