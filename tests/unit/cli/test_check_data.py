"""`understudy check` on data: every problem names the file and the row, in one line, before anything starts."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from understudy.cli.main import main

ASSETS = Path(str(resources.files("understudy.assets") / "quickstart"))
CHAT = [{"role": "user", "content": "12+34="}]
LONG = [{"role": "user", "content": "1" * 40}]
Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Checks a recipe beside whose file the given rows lie; what was said on both streams."""

    def run(rows: list[Any], *words: str, command: str = "check") -> tuple[int, str]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "recipe.toml").write_text(
            f'[student]\nmodel = "{ASSETS}/models/student"\n[teachers.add]\nmodel = "{ASSETS}/models/teacher-add"\n'
            '[data]\ntrain = "rows.jsonl"\n[loss]\ntopk = 8\n[rollout]\nmax_new_tokens = 8\n[trainer]\nbatch_size = 4\n'
        )
        code = main([command, str(tmp_path / "recipe.toml"), *words])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


def test_data_do_not_choose_the_code_that_runs(check: Check, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    rows = [{"messages": CHAT}, {"messages": CHAT, "agent": "evil:Loop"}]
    code, said = check(rows)
    assert code == 2 and "line 2 asks for the agent loop 'evil:Loop'; rows may name single_turn" in said
    assert not mark.exists()
    code, said = check([{"messages": CHAT, "agent_name": "my_agent"}])
    assert code == 2 and "rows.jsonl, line 1 asks for the agent loop 'my_agent'" in said
    assert check([{"messages": CHAT, "agent_name": "single_turn_agent"}])[0] == 0


def test_plain_text_under_the_tool_loop(check: Check) -> None:
    code, said = check([{"prompt": "12+34="}], "rollout.agent=tool")
    assert code == 2 and "line 1 is plain text (`prompt`), and the tool loop reads chats" in said


def test_the_key_of_missing_data_is_named(check: Check) -> None:
    code, said = check([{"messages": CHAT}], "data.eval=nowhere.jsonl")
    assert (
        code == 2 and "data.eval: dataset nowhere.jsonl does not exist" in said and "data.train" not in said
    )


def test_lists_and_globs_beside_the_recipe(check: Check, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.jsonl").write_text('{"prompt": "a"}\n{"messages": 7}\n')
    code, said = check([{"messages": CHAT}], 'data.train=["rows.jsonl", "more/*.jsonl"]')
    assert code == 2 and f"{tmp_path / 'more' / 'b.jsonl'}, line 2: messages is a int" in said
    code, said = check([{"messages": CHAT}], "data.train=more/none*.jsonl")
    assert code == 2 and "data.train: no file matches" in said
    code, said = check([{"messages": CHAT}], "data.train=more/c.jsonl")
    assert code == 2 and f"data.train: dataset {tmp_path / 'more' / 'c.jsonl'} does not exist" in said
    code, said = check([{"messages": CHAT}], "data.train=5")
    assert code == 2 and "`data.train` = 5: expected a list of texts" in said


def test_prompts_that_are_too_long(check: Check) -> None:
    rows = [{"messages": CHAT}, {"messages": LONG}, {"messages": LONG}]
    code, said = check(rows, "data.max_prompt_tokens=20")
    assert (
        code == 2
        and "the prompt of" in said
        and "rows.jsonl, line 2 has" in said
        and "(2 rows in all)" in said
    )
    code, said = check(rows, "data.max_prompt_tokens=20", "data.overlong=drop")
    assert code == 0 and "2 of 3 prompts have more than 20 tokens and are left out" in said
    code, said = check(rows, "data.max_prompt_tokens=20", "data.overlong=truncate_left")
    assert code == 0 and "2 of 3 prompts have more than 20 tokens and lose their beginning" in said
    code, said = check(rows[1:], "data.max_prompt_tokens=20", "data.overlong=drop")
    assert code == 2 and "leaves no row" in said
    room = [{"messages": CHAT}, {"messages": [{"role": "user", "content": "1" * 600}]}]
    assert check(room)[0] == 2 and check(room, "data.overlong=drop")[0] == 0


def test_passes_are_counted_in_steps(check: Check) -> None:
    rows = [{"messages": CHAT}] * 9 + [{"messages": LONG}]
    drop = ["data.max_prompt_tokens=20", "data.overlong=drop"]
    code, said = check(rows, "trainer.passes=2", *drop)
    assert code == 0 and "trainer.passes = 2 over 9 rows in batches of 4: 5 steps" in said
    assert "\n5 steps × 4 rollouts" in check(rows, "trainer.passes=2", *drop, command="plan")[1]
    assert "\n1 steps × 4 rollouts" in check(rows, "trainer.passes=0.4", *drop, command="plan")[1]
    assert "both `steps` and `passes`" in check(rows, "trainer={steps = 3, passes = 1.0}")[1]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for m in messages %}{{ raise_exception('no system here') }}{% endfor %}", "no system here"),
    ],
)
def test_a_template_may_raise_anything(check: Check, tmp_path: Path, template: str, expected: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (ASSETS / "models" / "student").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    code, said = check([{"messages": CHAT}], f"student.model={folder}")
    assert code == 2 and "rows.jsonl, line 1 cannot be rendered by the student's chat template" in said
    assert expected in said and "unexpected" not in said
