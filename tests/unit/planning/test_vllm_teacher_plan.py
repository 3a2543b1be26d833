"""What `check`, `plan` and `doctor` report about teachers behind vLLM servers that the run starts."""

import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.cli.main import main
from understudy.config import Recipe, parse_recipe
from understudy.errors import ConfigError
from understudy.planning.preflight import PYTHON_VARIABLE, preflight
from understudy.planning.processes import plan_processes
from understudy.planning.seating import seat

ASSETS = Path(__file__).parents[3] / "src/understudy/assets/quickstart"
TEACHER = str(ASSETS / "models/teacher-add")


def recipe(signal: str = "topk", **keys: Any) -> Recipe:
    teacher = {"model": TEACHER, "backend": "vllm", **keys}
    return parse_recipe(
        {
            "student": {"model": str(ASSETS / "models/student")},
            "teachers": {"big": teacher},
            "rollout": {"max_new_tokens": 8},
            "data": {"train": "rows.jsonl"},
            "loss": {"signal": signal, "topk": 8} if signal == "topk" else {"signal": signal},
        }
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantize": "int8"}, "`quantize` = 'int8' belongs to native replicas, and backend = 'vllm' is set"),
        ({"compile": True}, "`compile` = True belongs to native replicas"),
        ({"attention": "eager"}, "`attention` = 'eager' belongs to native replicas"),
        ({"ports": [8000]}, r"`ports` = \[8000\] belongs to native replicas"),
        ({"model": "student", "version": "live"}, "servers that score keep the weights they load"),
        ({"placement": "trainer"}, "has processes of its own; use placement = 'standalone' or 'pool'"),
        ({"engine_args": ["--tensor-parallel-size=2"]}, "set `tensor_parallel`, by which GPUs are assigned"),
        ({"engine_args": ["-tp", "2"]}, "set `tensor_parallel`"),
        ({"backend": "native", "engine_args": ["--x"]}, "`engine_args` belongs to vLLM servers that the run starts"),
        ({"backend": "auto", "vllm_python": "/p"}, "`vllm_python` belongs to vLLM servers that the run starts"),
        ({"backend": "sglang"}, "replicas started here are 'native' or 'vllm'"),
        (
            {"placement": "external", "urls": ["http://h:1"], "engine_args": ["--x"]},
            "`engine_args` belongs to processes that this run starts",
        ),
    ],
)  # fmt: skip
def test_contradicting_settings_of_a_vllm_teacher_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**keys)


def test_preflight_requires_a_vllm_interpreter_and_a_signal_that_vllm_offers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = (ASSETS / "data/train.jsonl").read_text().splitlines()[:4]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    (problem,) = preflight(recipe(), new_run=False)
    assert problem.startswith(
        "teachers.big.backend = 'vllm' starts vLLM in an environment of its own: set teachers.big.vllm_python"
    )
    (problem,) = preflight(recipe(vllm_python="/no/such/python"), new_run=False)
    assert problem == "teachers.big.vllm_python = '/no/such/python' is not an interpreter that can be run"
    assert preflight(recipe(vllm_python=sys.executable), new_run=False) == []
    (problem,) = preflight(recipe("hidden", vllm_python=sys.executable), new_run=False)
    assert problem == "teachers.big: cannot give hidden; its vllm backend offers sampled, topk"


def test_each_vllm_replica_is_planned_as_one_server_over_all_its_gpus() -> None:
    parsed = recipe(tensor_parallel=2, replicas=2, dtype="bfloat16")
    shown = {one.name: one for one in plan_processes(parsed, seat(parsed, 6))}
    assert [shown[f"teacher-big-{i}"].device for i in range(2)] == ["cuda:1,2", "cuda:3,4"]
    server = shown["teacher-big-0"]
    assert "vLLM, and its cache" in server.job and server.parameters and server.bytes
    assert server.bytes - 400 * 2**20 == 2 * server.parameters
    assert not any("rank" in name for name in shown)


def test_doctor_reports_a_missing_vllm_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        assert main(["doctor"]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("vllm "))

    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    assert f"none: {PYTHON_VARIABLE} names no interpreter" in shown()
    monkeypatch.setenv(PYTHON_VARIABLE, "/no/such/python")
    assert "has no vLLM (FileNotFoundError)" in shown()
