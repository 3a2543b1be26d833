"""`understudy check` on data: every problem names the file and the row, in one line, before anything starts."""

import json
import socket
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
    """Writes the rows beside a recipe and runs a command on it; returns the exit code and the output of both
    streams."""

    def run(rows: list[Any], *arguments: str, command: str = "check") -> tuple[int, str]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "recipe.toml").write_text(
            f'[student]\nmodel = "{ASSETS}/models/student"\n[teachers.add]\nmodel = "{ASSETS}/models/teacher-add"\n'
            '[data]\ntrain = "rows.jsonl"\n[loss]\ntopk = 8\n[rollout]\nmax_new_tokens = 8\n[trainer]\nbatch_size = 4\n'
        )
        code = main([command, str(tmp_path / "recipe.toml"), *arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_a_row_that_names_an_unknown_agent_loop_is_refused_and_its_module_is_not_imported(
    check: Check, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    rows = [{"messages": CHAT}, {"messages": CHAT, "agent": "evil:Loop"}]
    code, output = check(rows)
    assert (
        code == 2
        and "line 2 asks for the agent loop 'evil:Loop'; rows may name openenv, single_turn" in output
    )
    assert (
        not mark.exists() and '(to allow it, add [rollout.agent_options."evil:Loop"] to the recipe)' in output
    )
    code, output = check([{"messages": CHAT, "agent_name": "my_agent"}])
    assert code == 2 and "rows.jsonl, line 1 asks for the agent loop 'my_agent'" in output
    assert check([{"messages": CHAT, "agent_name": "single_turn_agent"}])[0] == 0


def test_numbers_in_the_teacher_column_select_teachers_by_their_text(check: Check) -> None:
    """Keys of teachers are text. Pandas turns a column of whole numbers into floats where a value is missing."""
    more = [
        f"teachers.sort.model={ASSETS}/models/teacher-sort",
        "teachers.sort.key='2'",
        "teachers.add.key='1'",
    ]
    keys = ["data.teacher_key=level", *more]
    rows = [{"messages": CHAT, "level": 1}, {"messages": CHAT, "level": 2.0}]
    assert check(rows, *keys)[0] == 0
    code, output = check([*rows, {"messages": CHAT, "level": 3}], *keys)
    assert code == 2 and "rows with level = '3' have no teacher; teachers take ['1', '2']" in output
    # Prompts are measured against the context of the teacher that scores them, not of the default teacher.
    short = ["data.default_teacher=add", "teachers.add.context_length=12"]
    assert check([{"messages": CHAT, "level": 2}], *keys, *short)[0] == 0
    assert "teachers.add holds 12 tokens" in check([{"messages": CHAT, "level": 1}], *keys, *short)[1]


def test_options_of_an_agent_loop_that_only_rows_name_are_checked(check: Check) -> None:
    rows = [{"messages": CHAT, "agent": "tool"}]
    tools = 'rollout.agent_options.tool.tools=["calculator"]'
    code, output = check(rows, tools, "rollout.agent_options.tool.max_turn=3")
    assert (
        code == 2 and "has no option `max_turn` (rollout.agent_options); did you mean `max_turns`?" in output
    )


def test_rows_for_the_tool_loop_are_refused_if_the_recipe_names_no_tools(check: Check) -> None:
    rows = [{"messages": CHAT}, *[{"messages": CHAT, "agent_name": "tool_agent"}] * 2]
    code, output = check(rows)
    assert code == 2 and output.count("error:") == 1
    assert (
        "rows.jsonl, line 2 asks for the tool loop (`agent`, or verl's tool_agent), and the recipe" in output
    )
    assert 'set rollout.agent_options.tool.tools, for example ["calculator"]' in output
    assert check(rows, 'rollout.agent_options.tool.tools=["calculator"]')[0] == 0
    assert check(rows, "rollout.agent=tool")[0] == 0


def test_the_tools_column_takes_json_text_or_names_of_tools_in_the_recipe(check: Check) -> None:
    rows = [{"messages": CHAT}, {"messages": CHAT, "tools": '[{"name": "less"}]'}]
    assert check(rows)[0] == 0
    for wrong, message in ((5, "tools is a int"), ("less", "tools is the text 'less', no JSON")):
        code, output = check([*rows, {"messages": CHAT, "tools": wrong}])
        assert code == 2 and f"rows.jsonl, line 3: {message}" in output and "unexpected" not in output
    named = [*rows, {"messages": CHAT, "tools": ["calculator"]}]
    code, output = check(named)
    assert (
        code == 2
        and "line 3 names the tool 'calculator' (`tools`), and the agent loop single_turn has" in output
    )
    assert check([{**named[2], "agent": "tool"}], 'rollout.agent_options.tool.tools=["calculator"]')[0] == 0


def test_a_plain_text_prompt_is_refused_under_the_tool_loop(check: Check) -> None:
    code, output = check([{"prompt": "12+34="}], "rollout.agent=tool")
    assert code == 2 and "line 1 is plain text (`prompt`), and the tool loop reads chats" in output


def test_the_error_about_a_missing_dataset_names_its_recipe_key(check: Check) -> None:
    code, output = check([{"messages": CHAT}], "data.eval=nowhere.jsonl")
    assert (
        code == 2
        and "data.eval: dataset nowhere.jsonl does not exist" in output
        and "data.train" not in output
    )


def test_lists_and_globs_of_data_files_are_resolved_relative_to_the_recipe(
    check: Check, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.jsonl").write_text('{"prompt": "a"}\n{"messages": 7}\n')
    code, output = check([{"messages": CHAT}], 'data.train=["rows.jsonl", "more/*.jsonl"]')
    assert code == 2 and f"{tmp_path / 'more' / 'b.jsonl'}, line 2: messages is a int" in output
    code, output = check([{"messages": CHAT}], "data.train=more/none*.jsonl")
    assert code == 2 and "data.train: no file matches" in output
    code, output = check([{"messages": CHAT}], "data.train=more/c.jsonl")
    assert code == 2 and f"data.train: dataset {tmp_path / 'more' / 'c.jsonl'} does not exist" in output
    code, output = check([{"messages": CHAT}], "data.train=5")
    assert code == 2 and "`data.train` = 5: expected a list of strings" in output


def test_the_error_about_a_malformed_row_names_file_line_and_column(check: Check) -> None:
    code, output = check([{"prompt": 7}])
    assert code == 2 and "rows.jsonl, line 1: prompt is a int; expected" in output
    code, output = check([{"prompt": [{"content": "x"}]}])
    assert code == 2 and "rows.jsonl, line 1: prompt[0] is {'content': 'x'}; expected" in output
    nested: list[Any] = []
    for _ in range(900):
        nested = [nested]
    code, output = check([{"prompt": "1+1="}, {"prompt": "1+1=", "tree": nested}])
    assert code == 2 and "rows.jsonl, line 2 is nested too deeply to be read" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.max_new_tokens=1000000"], "rollout.max_new_tokens = 1000000 it exceeds the student's context of 128;"),
        (["rollout.context_length=7"], "rollout.max_new_tokens = 8 it exceeds rollout.context_length = 7;"),
        (["rollout.max_new_tokens=120"], "rollout.max_new_tokens = 120 it exceeds the student's context of 128;"),
    ],
)  # fmt: skip
def test_the_error_about_too_many_tokens_names_the_context_length_that_is_exceeded(
    check: Check, words: list[str], message: str
) -> None:
    """Also where `max_new_tokens` alone exceeds it."""
    code, output = check([{"messages": [{"role": "user", "content": "1" * 12}]}], *words)
    assert code == 2 and message in output


def test_a_key_with_an_invalid_value_gives_one_error_and_none_about_its_default(check: Check) -> None:
    for word in ("loss.topk=0", "rollout.max_new_tokens=0"):
        code, output = check([{"messages": CHAT}], word)
        assert code == 2 and output.count("error:") == 1 and "expected a whole number of at least 1" in output


def test_prompts_that_are_too_long_are_refused_dropped_or_truncated(check: Check) -> None:
    rows = [{"messages": CHAT}, {"messages": LONG}, {"messages": LONG}]
    code, output = check(rows, "data.max_prompt_tokens=20")
    assert (
        code == 2
        and "the prompt of" in output
        and "rows.jsonl, line 2 has" in output
        and "(2 rows in all)" in output
    )
    code, output = check(rows, "data.max_prompt_tokens=20", "data.overlong=drop")
    assert code == 0 and "2 of 3 prompts have more than 20 tokens and are left out" in output
    code, output = check(rows, "data.max_prompt_tokens=20", "data.overlong=truncate_left")
    assert code == 0 and "2 of 3 prompts have more than 20 tokens and lose their beginning" in output
    code, output = check(rows[1:], "data.max_prompt_tokens=20", "data.overlong=drop")
    assert code == 2 and "leaves no row" in output
    too_long_for_student = [{"messages": CHAT}, {"messages": [{"role": "user", "content": "1" * 600}]}]
    assert check(too_long_for_student)[0] == 2 and check(too_long_for_student, "data.overlong=drop")[0] == 0
    small = ["teachers.add.context_length=40", "rollout.max_new_tokens=8"]
    code, output = check(rows, *small)
    limit = "data.max_prompt_tokens=31"
    assert (
        code == 2 and "data.max_prompt_tokens = 31 with data.overlong = 'drop' or 'truncate_left'" in output
    )
    assert check(rows, *small, limit, "data.overlong=truncate_left")[0] == 0
    for rule, what in (("drop", "are left out"), ("truncate_left", "lose their beginning")):
        code, output = check(rows, *small, f"data.overlong={rule}")
        message = f"2 of 3 prompts have more than 31 tokens (room that teachers leave for prompts: add 31) and {what}"
        assert code == 0 and message in output


def test_trainer_passes_are_converted_to_steps_without_dropped_prompts(check: Check) -> None:
    rows = [{"messages": CHAT}] * 9 + [{"messages": LONG}]
    drop = ["data.max_prompt_tokens=20", "data.overlong=drop"]
    code, output = check(rows, "trainer.passes=2", *drop)
    assert code == 0 and "trainer.passes = 2 over 9 rows in batches of 4: 5 steps" in output
    assert "\n5 steps × 4 rollouts" in check(rows, "trainer.passes=2", *drop, command="plan")[1]
    assert "\n1 step × 4 rollouts" in check(rows, "trainer.passes=0.4", *drop, command="plan")[1]
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
def test_any_exception_raised_by_a_chat_template_is_reported_with_the_row(
    check: Check, tmp_path: Path, template: str, expected: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (ASSETS / "models" / "student").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    code, output = check([{"messages": CHAT}], f"student.model={folder}")
    assert code == 2 and "rows.jsonl, line 1 cannot be rendered by the student's chat template" in output
    assert expected in output and "unexpected" not in output


def test_rows_with_pictures_are_refused_for_a_student_that_reads_text_only(
    check: Check, tmp_path: Path
) -> None:
    """The student's chat template joins strings and would raise a TypeError."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (ASSETS / "models" / "student").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text("{{ 'user: ' + messages[0].content }}")
    rows = [{"messages": CHAT}, {"messages": CHAT, "images": ["a.png"]}]
    code, output = check(rows, f"student.model={folder}")
    assert code == 2 and f"line 2 has pictures; student.model = '{folder}' reads text only" in output
    assert "cannot be rendered" not in output and "TypeError" not in output


REWARDS = """
import os, time, sys
def fine(row, text): print("noise"); return 1.0
async def slow_but_fine(row, text): return {"score": 0.5, "more": 1}
def compute_score(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str == ground_truth)
def threeargs(row, text, more): return 0.0
def nan(row, text): return float("nan")
def words(row, text): return "good"
def column(row, text): return row["missing"]
def raises(row, text): raise RuntimeError("grader broke\\n" + "so it did " * 100)
def hangs(row, text): time.sleep(60)
def crashes(row, text): print("last words", flush=True); os._exit(7)
def on_trajectory(row, trajectory): raise RuntimeError
constant = 3
"""


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("fine", None),
        ("slow_but_fine", None),
        ("compute_score", None),
        ("on_trajectory", None),
        ("threeargs", "takes (row, text, more) (missing a required argument: 'more'); expected (row, text)"),
        ("nan", "gave nan; expected a finite number, or a dict with `score` at"),
        ("words", "gave 'good'; expected a finite number"),
        ("column", "raised KeyError: 'missing' (the row has the columns answer, data_source, messages) at"),
        ("raises", "raised RuntimeError: grader broke so it did so it did"),
        ("hangs", "within 0.5 s; what takes longer belongs to its import"),
        ("crashes", "ended its process with code 7 (last words) at"),
        ("fien", "does not exist: has no function fien; did you mean 'fine'?"),
        ("constant", "is a int; expected a function"),
    ],
)
def test_check_calls_the_reward_on_a_row_and_reports_wrong_signatures_results_and_crashes(
    check: Check, tmp_path: Path, reward: str, expected: str | None
) -> None:
    """The reward's module is beside the recipe, in a folder that is not on Python's path."""
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    rows = [{"messages": CHAT, "answer": "64"}]
    code, output = check(rows, f"data.reward=own_rewards:{reward}", "rollout.deadline_seconds=0.5")
    assert "noise" not in output
    if expected is None:
        assert code == 0, output
    else:
        assert code == 2 and f"error: data.reward = 'own_rewards:{reward}' {expected}" in output.replace(
            f"({tmp_path}/own_rewards.py) ", ""
        ).replace("own_rewards has", "has").replace(f"gave no answer for {tmp_path}/rows.jsonl, line 1 ", "")
        assert output.count("error:") == 1
        if expected.endswith(" at"):
            assert f"{expected} {tmp_path}/rows.jsonl, line 1\n" in output


def test_a_reward_module_that_cannot_be_imported_is_refused_with_the_reason(
    check: Check, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    rows = [{"messages": CHAT}]
    message = check(rows, "data.reward=broken:f")[1]
    assert "data.reward = 'broken:f' cannot be imported: broken raised ZeroDivisionError" in message
    for file, where in (("broken.py", ""), ("../far/broken.py", ", with run.python_path = ['../far']")):
        message = check(rows, f"data.reward={file}:f")[1]
        assert f"a module is named without folder and .py; write 'broken:f'{where}\n" in message
    code, output = check(rows, "data.reward=nowhere_at_all:f")
    assert (
        code == 2
        and "cannot be imported: No module named 'nowhere_at_all'; modules are looked up beside the recipe"
        in output
    )


def test_built_in_rewards_check_the_answer_of_every_row(check: Check) -> None:
    rows = [
        {"messages": CHAT, "answer": "64"},
        {"messages": CHAT, "reward_model": {"ground_truth": "#### 7"}},
    ]
    assert check(rows, "data.reward=understudy.rollout.rewards.builtin:gsm8k")[0] == 0
    output = check(rows, "data.reward=understudy.rollout.reward:gsm8k")[1]
    assert "write 'understudy.rollout.rewards.builtin:gsm8k'" in output
    for reward in ("builtin:gsm8k", "builtin:exact_match", "math_reward:math_verify"):
        code, output = check([*rows, {"messages": CHAT}], f"data.reward=understudy.rollout.rewards.{reward}")
        assert code == 2, reward
        assert "line 3: the row has nothing in column 'answer' (or reward_model.ground_truth)" in output, (
            reward
        )
    output = check(
        [*rows, {"messages": CHAT, "answer": "many"}], "data.reward=understudy.rollout.rewards.builtin:gsm8k"
    )[1]
    assert "rows.jsonl, line 3: column 'answer' holds 'many'" in output


def test_a_reward_that_fails_on_only_some_rows_is_a_note_and_no_error(check: Check, tmp_path: Path) -> None:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    rows = [{"messages": CHAT, "missing": 1}, {"messages": CHAT}]
    code, output = check(rows, "data.reward=own_rewards:column")
    assert code == 0 and "line 2 (1 of 2 rows tried; each would be a dead letter)" in output
    code, output = check(
        [{"messages": CHAT, "answer": "1"}, {"messages": CHAT}],
        "data.reward=understudy.rollout.rewards.builtin:exact_match",
        "trainer.max_dead_letters=0.5",
    )
    assert code == 0 and "(1 of 2 rows; each would be a dead letter)" in output


def test_a_run_directory_that_cannot_be_created_is_refused_and_check_creates_none(
    check: Check, tmp_path: Path
) -> None:
    rows = [{"messages": CHAT}]
    (tmp_path / "afile").write_text("x")
    code, output = check(rows, f"run.dir={tmp_path / 'afile'}")
    assert code == 2 and "afile' is a file; name a folder" in output
    for folder in (tmp_path / "afile" / "run", Path("/proc/x"), Path("/sys/x/y")):
        code, output = check(rows, f"run.dir={folder}")
        assert code == 2 and "run.dir" in output and "unexpected" not in output, folder
    assert check(rows, f"run.dir={tmp_path / 'new' / 'run'}")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["afile", "recipe.toml", "rows.jsonl"]


def test_a_run_directory_that_already_holds_a_run_is_refused_by_check_and_train(
    check: Check, tmp_path: Path
) -> None:
    """`plan` starts nothing and accepts it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text("{}")
    where = tmp_path / "run"
    for command in ("check", "train"):
        code, output = check([{"messages": CHAT}], f"run.dir={where}", command=command)
        message = f"{where} holds a run already; continue it with `understudy resume {where}`, or name another folder in run.dir"
        assert code == 2 and f"error: {message}" in output
    assert check([{"messages": CHAT}], f"run.dir={where}", command="plan")[0] == 0


def test_an_unreachable_teacher_server_is_a_note_in_check_and_an_error_in_train(check: Check) -> None:
    """A note in `check`, because the server may be started later; `train` waits for it before it loads the student."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{busy.getsockname()[1]}"
        external = ('teachers.add.placement="external"', f'teachers.add.urls=["{url}"]')
        code, output = check([{"messages": CHAT}], *external)
        message = f"teachers.add.urls: no server accepts connections at {url} (Connection refused); start it, or correct"
        assert code == 0 and message in output and "sound as far as it could be checked" in output
        soon = "cluster.start_timeout_seconds=0.5"
        code, output = check([{"messages": CHAT}], *external, soon, command="train")
        assert (
            code == 2
            and f"no answer within 0.5 s (cluster.start_timeout_seconds); the last one of {url}: Connection refused"
            in output
        )
        wrong = 'teachers.add.urls=["http://no-such-host.invalid:1"]'
        code, output = check([{"messages": CHAT}], external[0], wrong, command="train")
        assert (
            code == 2
            and "error: teachers.add.urls: no server accepts connections at http://no-such-host.invalid:1"
            in output
        )
        busy.listen()
        assert "no server accepts" not in check([{"messages": CHAT}], *external)[1]
