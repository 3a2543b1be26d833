"""Shell scripts are read, not run: variables, arrays, arithmetic, quotes; what only a shell knows is named."""

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
    ],
)  # fmt: skip
def test_words(text: str, words: list[str]) -> None:
    script = read_script(text, {"HOME": "/home/me"})
    assert next(one for one in script.commands if one[0] in ("run", "python")) == words
    assert script.unresolved == []


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
def test_what_only_a_shell_knows_stays_and_is_named(text: str, word: str, named: str) -> None:
    script = read_script(text, {})
    assert script.commands == [["run", word]] and script.unresolved == [named]


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
def test_a_script_that_ends_in_the_middle_is_read_up_to_there(
    text: str, commands: list[list[str]], unresolved: list[str]
) -> None:
    script = read_script(text, {})
    assert script.commands == commands and script.unresolved == unresolved
