"""What the quickstart prints: its first line before heavy imports, its note, and the next experiment it suggests."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from understudy.cli.commands import quickstart
from understudy.config.recipe import load_recipe

RECIPE = Path(quickstart.__file__).parents[2] / "assets/quickstart/recipe.toml"


def test_quickstart_prints_its_first_line_before_heavy_imports() -> None:
    """Checks the imported modules instead of the time, because a machine under load is slow."""
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


def test_an_early_interrupt_prints_interrupted_and_no_traceback() -> None:
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


def test_the_note_of_the_recipe_has_a_correct_example_of_a_reversed_sum() -> None:
    note = load_recipe(RECIPE).run.note or ""
    a, b, written, read = re.search(
        r"(\d+)\+(\d+)= is rightly answered (\d+), which reads (\d+)", note
    ).groups()  # type: ignore[union-attr]
    assert int(a) + int(b) == int(read) and written == read[::-1]


def test_the_suggested_next_experiment_uses_forward_kl() -> None:
    """Reverse KL, policy gradients and GRPO are much worse on these models (docs/results.md)."""
    overrides = quickstart._NEXT.partition("#")[0].split()
    loss = load_recipe(RECIPE, overrides).loss
    assert loss.kind == "forward_kl" and loss.task_coef == 0 and not loss.policy_gradient
