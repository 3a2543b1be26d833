"""A run's threads: one operation at a time, or micro-batches in parallel lanes; and when oneDNN is off."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from understudy.assembly.cpu_threads import onednn_as_resolved
from understudy.config import Recipe
from understudy.planning import cpu_lanes
from understudy.planning.resolved import Compute, resolve

STUDENT = Path(str(resources.files("understudy.assets") / "quickstart")) / "models" / "student"


def compute(model: Path = STUDENT, **tables: dict[str, Any]) -> Compute:
    student = {"model": str(model), "device": "cpu", **tables.pop("student", {})}
    recipe = Recipe.model_validate(
        {
            "student": student,
            "teachers": {"t": {"model": str(STUDENT)}},
            "data": {"train": "prompts.jsonl"},
            "trainer": {"steps": 1, "batch_size": 4, **tables.pop("trainer", {})},
            "run": {"dir": "run", "threads": 3, **tables.pop("run", {})},
        }
    )
    return resolve(recipe, gpus=0).compute


def test_a_small_student_on_a_cpu_gets_one_lane_per_thread() -> None:
    assert (compute().lanes, compute().threads) == (3, 1)


@pytest.mark.parametrize(
    "tables", [{"run": {"threads": 1}}, {"trainer": {"ranks": 2}}, {"student": {"compile": True}}]
)
def test_one_thread_several_ranks_or_a_compiled_student_leave_all_threads_to_one_lane(
    tables: dict[str, Any],
) -> None:
    one, threads = compute(**tables), tables.get("run", {}).get("threads", 3)
    assert (one.lanes, one.threads) == (1, threads)


def test_without_run_threads_torch_chooses_the_number_of_threads() -> None:
    assert compute(run={"threads": None}).threads is None


def test_large_and_unknown_students_get_one_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "student"
    shutil.copytree(STUDENT, own)
    assert compute(own).lanes == 3
    config = json.loads((own / "config.json").read_text())
    for changes in ({"model_type": "mamba"}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}):
        (own / "config.json").write_text(json.dumps(config | changes))
        assert compute(own).lanes == 1
    (own / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(cpu_lanes, "SMALL", 1000)
    assert compute(own).lanes == 1
    assert compute(Path("owner/name")).lanes == 1


def onednn_enabled(one: Compute) -> bool:
    with onednn_as_resolved(one):
        return bool(torch.backends.mkldnn.enabled)


def test_onednn_is_off_only_for_lanes_of_float32_models_without_biases_and_is_restored(
    tmp_path: Path,
) -> None:
    assert not onednn_enabled(compute())
    assert torch.backends.mkldnn.enabled  # restored for later code in this process
    assert onednn_enabled(compute(run={"threads": 1})) and onednn_enabled(
        compute(student={"dtype": "bfloat16"})
    )
    own = tmp_path / "student"
    shutil.copytree(STUDENT, own)
    config = json.loads((own / "config.json").read_text())
    for changes in (
        {"attention_bias": True},
        {"model_type": "qwen2"},
        {"model_type": "llama", "mlp_bias": True},
    ):
        (own / "config.json").write_text(json.dumps(config | changes))
        assert compute(own).lanes == 3 and onednn_enabled(compute(own))
    with pytest.raises(ZeroDivisionError), onednn_as_resolved(compute()):
        raise ZeroDivisionError
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize(("inputs", "outputs"), [(96, 288), (288, 96), (96, 44), (37, 100)])
def test_matrix_products_without_a_bias_have_the_same_bits_with_and_without_onednn(
    inputs: int, outputs: int
) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    for rows in (1, 15, 16, 128, 531, 1000):
        states = torch.randn(rows, inputs, generator=generator)
        answers = torch.randn(rows, outputs, generator=generator)
        products = (
            lambda states=states: linear(states, weight),
            lambda answers=answers: answers @ weight,
            lambda states=states, answers=answers: answers.t() @ states,
        )
        with_onednn = [product() for product in products]
        with onednn_as_resolved(compute()):
            without_onednn = [product() for product in products]
        assert all(torch.equal(a, b) for a, b in zip(with_onednn, without_onednn, strict=True)), rows
