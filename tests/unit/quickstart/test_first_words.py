"""The quickstart says something before it has loaded anything heavy, and what it ends with does not mislead."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from understudy.cli.commands import quickstart
from understudy.config.recipe import load_recipe

RECIPE = Path(quickstart.__file__).parents[2] / "assets/quickstart/recipe.toml"


def test_first_words_come_before_heavy_imports() -> None:
    """What loads before them is counted, not timed: machines under load are slow."""
    script = (
        "import sys\n"
        "import understudy.cli.main as command\n"
        "class Seen(Exception): ...\n"
        "def seen(*a, **k):\n"
        "    print(sorted({n.partition('.')[0] for n in sys.modules} & set(sys.argv[1].split())))\n"
        "    raise SystemExit\n"
        "import understudy.cli.commands.quickstart as q\n"
        "q.print = seen\n"
        "command.main(['quickstart'])\n"
    )
    heavy = "torch transformers numpy pyarrow pydantic httpx rich"
    done = subprocess.run([sys.executable, "-c", script, heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout


def test_an_early_interrupt_is_one_word() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli.main", "quickstart"],
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    first = process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    rest = process.stderr.read()
    assert process.returncode == 130 and "minutes" in first
    assert rest.strip().splitlines()[-1] == "interrupted" and "Traceback" not in rest


def test_the_note_explains_how_sums_are_written() -> None:
    note = load_recipe(RECIPE).run.note or ""
    a, b, written, read = re.search(
        r"(\d+)\+(\d+)= is rightly answered (\d+), which reads (\d+)", note
    ).groups()  # type: ignore[union-attr]
    assert int(a) + int(b) == int(read) and written == read[::-1]


def test_the_next_experiment_is_one_that_works() -> None:
    """docs/results.md: reverse KL, policy gradients and GRPO are far behind on these models."""
    overrides = quickstart._NEXT.partition("#")[0].split()
    loss = load_recipe(RECIPE, overrides).loss
    assert loss.kind == "forward_kl" and loss.task_coef == 0 and not loss.policy_gradient
