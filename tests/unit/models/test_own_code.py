"""Models whose code comes with them (`trust_remote_code`): loaded on request alone, the same by trainer, teacher and engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_code import ASSETS, write_house_model
from plain_figures import generation_error, gradient_error, plain_logprobs, rows_of, score_error
from transformers import AutoModelForCausalLM, dynamic_module_utils

from understudy.config import Recipe, parse_recipe
from understudy.engines.hosted.process import load_engine, parse_args
from understudy.errors import ConfigError, EngineError, PolicyError, TeacherError
from understudy.planning.preflight import preflight
from understudy.policy.load import load_student
from understudy.teacher.scoring.model import load_frozen

VOCAB, CONTEXT = 44, 128
ROWS = Path(__file__).parent / "three_rows.jsonl"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder; what transformers copies of its code goes to a folder of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")), raising=True
        )
        yield write_house_model(tmp_path_factory.mktemp("models") / "house")


def recipe_of(house: Path, **trusted: bool) -> Recipe:
    return parse_recipe(
        {
            "student": {"model": str(house), "trust_remote_code": trusted.get("student", False)},
            "teachers": {"t": {"model": str(house), "trust_remote_code": trusted.get("teacher", False)}},
            "data": {"train": str(ROWS)},
            "loss": {"topk": 8},
            "rollout": {"max_new_tokens": 8},
        }
    )


def test_teacher_student_and_engine_compute_what_the_folder_s_code_says(house: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(house, trust_remote_code=True).eval()
    teacher = load_frozen(str(house), trust_remote_code=True).model
    student = load_student(str(house), trust_remote_code=True).model
    arguments = ["--model", str(house), "--max-length", "64", "--trust-remote-code"]
    engine, adapted = load_engine(parse_args(arguments))
    asyncio.run(engine.close())
    rows = rows_of((9, 40, 23), VOCAB)
    expected = plain_logprobs(plain, rows[0])
    for model in (teacher, student, adapted._model):
        assert type(model).__name__ == "HouseForCausalLM"
        torch.testing.assert_close(plain_logprobs(model.eval(), rows[0]), expected)
    without: Any = AutoModelForCausalLM.from_pretrained(ASSETS / "models" / "student").eval()
    assert abs(plain_logprobs(without, rows[0]) - expected).max() > 0.1, "the code makes a difference"
    assert score_error(plain, rows) < 2e-5
    assert gradient_error(plain, rows) < 2e-5
    assert generation_error(plain, rows[:2], 10, CONTEXT) < 2e-5


def test_without_trust_the_refusal_is_one_line_that_says_what_to_set(house: Path) -> None:
    message = r"its code comes with the model \(auto_map in config.json\); set trust_remote_code = true"
    with pytest.raises(TeacherError, match=message) as refused:
        load_frozen(str(house))
    assert "\n" not in str(refused.value)
    with pytest.raises(PolicyError, match=message):
        load_student(str(house))
    with pytest.raises(EngineError, match=message):
        load_engine(parse_args(["--model", str(house), "--max-length", "64"]))


def test_check_says_which_key_to_set_and_a_folder_needs_no_revision(house: Path) -> None:
    problems = preflight(recipe_of(house))
    assert len(problems) == 2
    for section, problem in zip(("student", "teachers.t"), problems, strict=True):
        assert problem.startswith(f"{section}.model = ") and "no model type 'house' of its own" in problem
        assert f"set {section}.trust_remote_code = true" in problem
    assert preflight(recipe_of(house, student=True, teacher=True)) == []


def test_a_hub_id_still_needs_its_revision(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="'org/model' is not a folder on this machine: pin it with `revision`"
    ):
        recipe_of(Path("org/model"), teacher=True)
    with pytest.raises(TeacherError, match="pin it with a revision"):
        load_frozen("org/model", trust_remote_code=True)


def test_code_beside_a_model_that_transformers_knows_is_not_asked_for(house: Path, tmp_path: Path) -> None:
    """Many folders of the hub still carry the code they were published with."""
    known = write_house_model(tmp_path / "known")
    text = (known / "config.json").read_text().replace('"house"', '"qwen3"')
    (known / "config.json").write_text(text)
    assert preflight(recipe_of(known)) == []
    assert type(load_frozen(str(known)).model).__name__ == "Qwen3ForCausalLM"
