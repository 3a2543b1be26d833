"""Shell scripts are read, not run: variables, arrays, arithmetic, quotes. What only a shell can know is reported."""

from pathlib import Path

import pytest

from understudy.porting.shell import read_script


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python -m verl a.b=1 c.d='x y'", ["python", "-m", "verl", "a.b=1", "c.d=x y"]),
        ("A=3\nrun a=$A b=${A} c=\"$A-$A\" d='$A'", ["run", "a=3", "b=3", "c=3-3", "d=$A"]),
        ("run a=${LR:-1e-6} b=${LR:-$(( 2 ))}", ["run", "a=1e-6", "b=2"]),
        ("N=${N:-4}; M=$((N * 2 + 1)); run a=$M", ["run", "a=9"]),
        ("run a=$(((512*100))) b=$(( -3 + 10 / 4 ))", ["run", "a=51200", "b=-1"]),
        ("run \\\n    a=1 \\\n    b=2 # c=3\n", ["run", "a=1", "b=2"]),
        ("X=(\n  a=1\n  # a=5\n  b=\"$HOME/x\"\n)\nX+=(c=3)\nrun \"${X[@]}\" \"$@\"", ["run", "a=1", "b=/home/me/x", "c=3"]),
        ("E=(--a --b)\nrun x=\"u ${E[*]}\"", ["run", "x=u --a --b"]),
        ("F=\"['$HOME/a', '$HOME/b']\"\nrun f=\"$F\"", ["run", "f=['/home/me/a', '/home/me/b']"]),
        ("run a=1 2>&1 | tee out.log", ["run", "a=1"]),
        ("run l='[\"console\",\"wandb\"]'", ["run", 'l=["console","wandb"]']),
        ("export A=1 B=2\nrun a=$A b=$B", ["run", "a=1", "b=2"]),
        ("if ((1 < 2)); then\n  A=5\nfi\nrun a=$A", ["run", "a=5"]),
        ("cat <<EOF\nrun a=9\nEOF\nrun a=1", ["run", "a=1"]),
        ("run a=${1:-4} b=${2-x} \"${@:-}\"", ["run", "a=4", "b=x"]),
        ("F=${F:-[\"/rows\", \"$HOME/b\"]}\nrun f=\"$F\" g=${G:-'1e-6'}", ["run", "f=[/rows, /home/me/b]", "g=1e-6"]),
        (": ${A:=7}\nrun a=$A b=${A:?needed}", ["run", "a=7", "b=7"]),
        ("M=Org/Big-7B\nrun ${M,,} ${M##*/} ${M%%/*} ${M/Big/Small} ${M//B/b}", ["run", "org/big-7b", "Big-7B", "Org", "Org/Small-7B", "Org/big-7b"]),
        ("A=(x y)\nrun ${A[1]} \"${A[@]+\"${A[@]}\"}\"", ["run", "y", "x", "y"]),
        ("M=org/big\nrun a=$(basename \"$M\") b=$(echo $M) c=\"$(dirname $M)\"", ["run", "a=big", "b=org/big", "c=org"]),
        ("C=\"a=1 \\\n  b=2\"\nrun $C c=3 d=\"$C\"", ["run", "a=1", "b=2", "c=3", "d=a=1   b=2"]),
        ("A='x'\\\n'y'\nrun a=$A", ["run", "a=xy"]),
        ("run a=1 \\\r\n  b=2\r\n", ["run", "a=1", "b=2"]),
        ("(cd here; B=2)\nrun a=${B:-1}", ["run", "a=2"]),
        ("f() {\n  local A=3\n  run a=$A \"$@\"\n}\nf", ["run", "a=3"]),
    ],
)  # fmt: skip
def test_the_words_of_a_command_are_expanded_as_a_shell_does(text: str, words: list[str]) -> None:
    script = read_script(text, {"HOME": "/home/me"})
    assert next(one.words for one in script.commands if one.words[0] in ("run", "python")) == words
    assert script.unresolved == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("if [ \"$A\" = 1 ]; then X=1; elif [ -z \"$A\" ]; then X=2; else X=3; fi\nrun $X", ["run", "2"]),
        ("A=2\nif [[ $A == 2 && -n \"${B:-b}\" ]]; then X=1; else X=2; fi; run $X", ["run", "1"]),
        ("if [ \"${A:-1}\" != 0 ] && { [ x = y ] || [ z = z ]; }; then X=1; else X=2; fi\nrun $X", ["run", "1"]),
        ("A=3\nif ((A <= 0 || A > 2)); then X=1; else X=2; fi\nrun $X", ["run", "1"]),
        ("A=1\n[ \"${A}\" -gt 1 ] && X=${A} || X=null\nrun $X", ["run", "null"]),
        ("case \"${D:-gpu}\" in\n  npu) X=1 ;;\n  gpu|cuda)\n    X=2\n    ;;\n  *) X=3 ;;\nesac\nrun $X", ["run", "2"]),
        ("case other in npu) X=1;; *) X=3;; esac; run $X", ["run", "3"]),
        ("X=()\nif false; then X=(a=1); fi\nrun \"${X[@]}\" b=2", ["run", "b=2"]),
        ("if ! [ a = b ]; then X=1; fi\nrun $X", ["run", "1"]),
        ("D=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)\nrun $D", ["run", "gpu"]),
        ("cd there || exit 1\nX=1\nrun $X || X=2\nrun $X", ["run", "1"]),
    ],
)  # fmt: skip
def test_only_the_branch_that_would_run_is_read(text: str, words: list[str]) -> None:
    script = read_script(text, {})
    ran = [one for one in script.commands if one.words[0] == "run"]
    assert {tuple(one.words) for one in ran} == {tuple(words)} and ran[0].undecided == []


@pytest.mark.parametrize(
    ("text", "words", "names"),
    [
        ("if [ -d /data ]; then X=1; else X=2; fi\nrun a=$X", ["run", "a=2"], ["X"]),
        ("if nvidia-smi; then N=8; fi\nM=$N\nrun a=$M b=1", ["run", "a=8", "b=1"], ["N"]),
        ('if [ -d /data ]; then X=(a=1); fi\nrun "${X[@]}"', ["run", "a=1"], ["X"]),
        ("for s in 1 2 3; do\n  run seed=$s\ndone", ["run", "seed=3"], ["s"]),
        ("case $(hostname) in a*) X=1;; *) X=2;; esac\nrun a=$X", ["run", "a=2"], ["X"]),
        ("X=1\nif [ -d /data ]; then X=2; fi\nX=3\nrun a=$X", ["run", "a=3"], []),
    ],
)
def test_variables_that_depend_on_a_condition_of_the_machine_are_reported_as_undecided(
    text: str, words: list[str], names: list[str]
) -> None:
    command = next(one for one in read_script(text, {}).commands if one.words[0] == "run")
    assert command.words == words and command.undecided == names


def test_the_folder_of_the_script_is_resolved_and_sourced_files_are_listed(tmp_path: Path) -> None:
    text = 'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"\nsource "$HERE/env.sh"\nrun a=$HERE'
    script = read_script(text, {}, tmp_path / "bin" / "run.sh")
    assert [one.words for one in script.commands] == [["run", f"a={tmp_path}"]]
    assert script.sourced == [f"{tmp_path}/env.sh"] and script.unresolved == []


@pytest.mark.parametrize(
    ("text", "word", "named"),
    [
        ("run a=$DATA/x", "a=$DATA/x", "$DATA"),
        ("run a=$(date +%s)", "a=$(date +%s)", "$(date +%s)"),
        ("run a=$1", "a=$1", "$1"),
        ("run a=$((2 ** 9))", "a=$((2 ** 9))", "$((2 ** 9))"),
        ("run a=`hostname`", "a=`hostname`", "`hostname`"),
    ],
)
def test_expressions_that_only_a_shell_can_evaluate_are_kept_and_reported(
    text: str, word: str, named: str
) -> None:
    script = read_script(text, {})
    assert [one.words for one in script.commands] == [["run", word]] and script.unresolved == [named]


@pytest.mark.parametrize(
    ("text", "commands", "unresolved"),
    [
        ("run a='x", [["run", "a=x"]], []),
        ('run a="x', [["run", "a=x"]], []),
        ("run a=${x", [["run", "a=$x"]], ["$x"]),
        ("X=(a b", [], []),
        ("run a=$((1", [["run", "a=$((1"]], ["$((1"]),
        ("run <<EOF", [["run"]], []),
        ("run $", [["run", "$"]], []),
    ],
)
def test_an_incomplete_script_is_read_as_far_as_it_goes(
    text: str, commands: list[list[str]], unresolved: list[str]
) -> None:
    script = read_script(text, {})
    assert [one.words for one in script.commands] == commands and script.unresolved == unresolved
