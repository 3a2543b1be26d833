"""Commands on runs or models that do not exist are refused before torch is imported or the hub is retried."""

import json
import os
import subprocess
import sys

import pytest

EACH = """
import json, sys
from understudy.cli.main import main
for words in json.loads(sys.argv[1]):
    code = main(words)
    print("==", code, "torch" in sys.modules or "transformers" in sys.modules, file=sys.stderr)
"""
OWN = "a run that has none"
TRAINED = "a run of 6 steps"
MEASURED = "a run with held-out problems"
CASES = [
    (["eval", "runs/nothere"], "error: runs/nothere is not a run directory: the folder does not exist; give the folder that a run"),
    (["export", "runs/nothere", "out"], "error: runs/nothere is not a run directory: the folder does not exist"),
    (["replay", "runs/nothere"], "error: runs/nothere is not a run directory: the folder does not exist"),
    (["export", OWN, OWN], f"error: {OWN} exists and is not empty; give a new folder to export to"),
    (["replay", OWN], f"error: {OWN}: no step was refused"),
    (["eval", OWN, "--data", "rows.jsonl"], "nothing to measure with: give --reward module:function (from Python"),
    (["resume", TRAINED, "trainer.steps=3"], f"error: trainer.steps = 3: {TRAINED} has taken 6 steps already; steps are counted"),
    (["eval", MEASURED, "--answers", "lost/a.jsonl"], "/lost does not exist; make it, or name another file"),
    (["eval", MEASURED, "--answers", "models"], "error: --answers models is a folder; name a file"),
    (["eval", "models/lost"], "error: model = 'models/lost': no such folder; did you mean"),
    (["eval", "models/last"], "give --data FILE and --reward module:function (from Python: data, reward); models/last is not a run"),
    (["eval", "models/last", "--best"], "--best chooses among the checkpoints of a run, and models/last is none"),
    (["serve-teacher", "models/lost"], "error: model = 'models/lost': no such folder; did you mean"),
    (["serve-teacher", "./lost"], "error: model = './lost': no such folder; give a folder with config.json, or a hub id"),
    (["serve-teacher", "/lost/model"], "error: model = '/lost/model': no such folder"),
    (["serve-teacher", "maker/tiny"], "error: model = 'maker/tiny': no such folder here, no such model in the local hub cache"),
]  # fmt: skip


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of each command. All run in one process, so an import by one of them would show in all later ones."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "models" / "last").mkdir(parents=True)
    (folder / OWN).mkdir()
    (folder / OWN / "recipe.json").write_text(
        '{"data": {"eval": null, "reward": null}, "run": {"dir": null}}'
    )
    (folder / MEASURED).mkdir()
    (folder / MEASURED / "recipe.json").write_text(
        '{"data": {"eval": ["rows.jsonl"], "reward": "m:f"}, "run": {"dir": null}}'
    )
    (folder / TRAINED / "checkpoints" / "step-000006").mkdir(parents=True)
    table = {"student": {"model": "s"}, "teachers": {"one": {"model": "t"}}, "data": {"train": "rows.jsonl"}}
    (folder / TRAINED / "recipe.json").write_text(json.dumps({**table, "run": {"dir": None}}))
    env = {**os.environ, "HF_HOME": str(folder / "home"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps([arguments for arguments, _ in CASES])],
        cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout.split(" False\n")


@pytest.mark.parametrize(
    ("place", "arguments", "message"), [(place, *case) for place, case in enumerate(CASES)]
)
def test_a_missing_run_model_or_file_is_refused_before_torch_is_imported(
    outputs: list[str], place: int, arguments: list[str], message: str
) -> None:
    assert message in outputs[place] and outputs[place].endswith("== 2"), outputs[place]
