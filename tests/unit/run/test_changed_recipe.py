"""Which keys of the recipe may change when a run is resumed."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from understudy.assembly.this_machine import settings_of_run
from understudy.config import Recipe, parse_recipe
from understudy.config.base import flatten
from understudy.errors import ConfigError
from understudy.observability.rundir import RunDir
from understudy.planning.resolved import resolve
from understudy.run.changed_recipe import ACCEPTED, ONLY_MORE, REFUSED, changed_recipe, refuse_cut_window

TABLE: dict[str, Any] = {
    "student": {"model": "student"},
    "teachers": {"add": {"model": "teacher", "key": "add"}, "sort": {"model": "teacher", "key": "sort"}},
    "data": {"train": "train.jsonl", "reward": "understudy.rollout.rewards.builtin:exact_match"},
}


PPO: dict[str, Any] = {**TABLE, "loss": {"task_coef": 1.0, "advantage": "gae"}, "critic": {}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "recipe.json").write_text(json.dumps(parse_recipe(TABLE).model_dump()))
    return RunDir.open(tmp_path)


def test_allowed_changes_are_listed_with_their_reasons(run: RunDir) -> None:
    recipe, changes = changed_recipe(
        run, ["trainer.steps=400", "teachers.add.replicas=3", "run.loggers=['wandb']", "trainer.ranks=2"]
    )
    assert recipe.trainer.steps == 400 and recipe.teachers["add"].replicas == 3
    assert [change.key for change in changes] == [
        "run.loggers", "teachers.add.replicas", "trainer.ranks", "trainer.steps",
    ]  # fmt: skip
    assert "100 → 400" in str(changes[-1]) and "how far" in str(changes[-1])


@pytest.mark.parametrize("key", ["student.model", "teachers.add.model", "data.train"])
def test_a_refused_change_of_a_path_suggests_a_symbolic_link(run: RunDir, key: str) -> None:
    with pytest.raises(ConfigError, match="put a symbolic link at the old one"):
        changed_recipe(run, [f"{key}=moved"])
    with pytest.raises(ConfigError) as error:
        changed_recipe(run, ["run.seed=1"])
    assert "symbolic link" not in str(error.value)


def test_a_change_of_passes_names_the_steps_that_they_replace(run: RunDir) -> None:
    recipe, (change,) = changed_recipe(run, ["trainer.passes=3"])
    assert recipe.trainer.passes == 3
    message = "trainer.passes = 3.0 (how far the run goes; in place of trainer.steps = 100)"
    assert str(change) == message


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("run.seed=1", "randomness"),
        ("student.model=other", "one model"),
        ("loss.kind=reverse_kl", "objective"),
        ("loss.topk=8", "objective"),
        ("trainer.batch_size=32", "batches of the old size"),
        ("trainer.learning_rate=1e-3", "optimizer"),
        ("data.train=other.jsonl", "place in the data"),
        ("teachers.add.model=other", "scored"),
        ("rollout.temperature=0.5", "other rules"),
        ("rollout.max_new_tokens=9", "other rules"),
    ],
)
def test_changes_that_alter_the_training_are_refused_with_the_reason(
    run: RunDir, override: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        changed_recipe(run, [override, "trainer.steps=400"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"cannot resume with {override.split('=')[0]} = ")


@pytest.mark.parametrize(
    ("saved", "before", "after", "message"),
    [
        (
            10,
            10,
            20,
            r"ended at step 10, inside a window of trainer.sync_every = 4 .* start a new run from its export",
        ),
        (9, 20, 10, "would end at step 10, inside a window .* give 12 steps$"),
        (5, 20, 10, "give 12 steps or 8$"),
        (12, 12, 20, None),
        (9, 10, 20, None),
        (9, 20, 12, None),
        (10, 20, 10, None),
        (10, 20, 20, None),
    ],
)
def test_a_change_of_steps_may_not_cut_a_window_of_several_updates(
    run: RunDir, saved: int, before: int, after: int, message: str | None
) -> None:
    """The rows of a window are taken for all of its updates. Once, one update trained several batches at once, or waited for
    rows that no process wrote."""
    (run.checkpoints / f"step-{saved:06d}").mkdir(parents=True)
    (run.checkpoints / f"step-{saved:06d}" / "manifest.json").touch()
    old, new = (
        parse_recipe({**TABLE, "trainer": {"mode": "fully_async", "sync_every": 4, "steps": steps}}).trainer
        for steps in (before, after)
    )
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        refuse_cut_window(run, old, new, rows=100)


@pytest.mark.parametrize(
    "override",
    ["rollout.processes=2", "rollout.workers=2", "rollout.deadline_seconds=5", "cluster.restarts.rollout=1"],
)
def test_settings_of_rollout_processes_may_change(run: RunDir, override: str) -> None:
    recipe, (change,) = changed_recipe(run, [override])
    assert change.key == override.split("=")[0]
    assert flatten(recipe.model_dump())[change.key] == change.after != change.before


def resumable(folder: Path, **sections: dict[str, Any]) -> RunDir:
    table = {**TABLE, **{name: {**TABLE.get(name, {}), **section} for name, section in sections.items()}}
    (folder / "recipe.json").write_text(json.dumps(parse_recipe(table).model_dump()))
    return RunDir.open(folder)


def test_solved_at_may_change_unless_the_prompt_of_a_teacher_reads_the_solution(tmp_path: Path) -> None:
    def with_prompt(prompt: str) -> RunDir:
        teachers = {"add": {"model": "teacher", "key": "add", "prompt": prompt}}
        (tmp_path / "recipe.json").write_text(
            json.dumps(parse_recipe({**TABLE, "teachers": teachers}).model_dump())
        )
        return RunDir.open(tmp_path)

    _, (change,) = changed_recipe(with_prompt("{{ prompt }} {{ session.reward }}"), ["trainer.solved_at=0.5"])
    assert change.key == "trainer.solved_at"
    with pytest.raises(
        ConfigError, match=r"cannot resume with trainer.solved_at = 0.5, .* `session.solution`"
    ):
        changed_recipe(with_prompt("{{ prompt }} {{ session.solution or '' }}"), ["trainer.solved_at=0.5"])


def test_a_run_of_an_earlier_version_is_resumed_without_the_keys_that_it_did_not_set(tmp_path: Path) -> None:
    """recipe.json lists every key, and a key may have been removed from the project since."""
    run = resumable(tmp_path, rollout={"agent_options": {"own:Loop": {"nested": {"flag": False}}}})
    table = json.loads(run.recipe.read_text())
    table["trainer"]["lend_after"] = None
    table["student"]["gpu_share"] = 1.0
    table["teachers"] = {
        name: {**teacher, "gpu_share": 1.0, "restarts": 5} for name, teacher in table["teachers"].items()
    }
    assert table["teachers"]
    run.recipe.write_text(json.dumps(table))
    recipe, (change,) = changed_recipe(run, ["trainer.steps=9"])
    assert change.key == "trainer.steps" and recipe.rollout.agent_options["own:Loop"] == {
        "nested": {"flag": False}
    }
    table["student"]["gpu_share"] = 0.5
    table["trainer"]["lend_after"] = 5
    run.recipe.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as refused:
        changed_recipe(run, [])
    assert [problem.partition(":")[0] for problem in refused.value.problems] == [
        "unknown key `student.gpu_share`; it was removed",
        "unknown key `trainer.lend_after`; it was removed",
    ]


def test_the_addresses_of_rollout_servers_may_change(tmp_path: Path) -> None:
    run = resumable(tmp_path, rollout={"engine": "vllm", "urls": ["http://10.0.0.1:8000"]})
    changed, changes = changed_recipe(
        run,
        [
            "rollout.urls=['http://10.0.0.2:8000']",
            "rollout.token_env=TOKEN",
            "rollout.served_model=mine",
            "rollout.snapshots=/shared",
        ],
    )
    assert changed.rollout.urls == ["http://10.0.0.2:8000"] and len(changes) == 4
    with pytest.raises(ConfigError, match="other weights"):
        changed_recipe(run, ["rollout.live_weights=false"])


def test_devices_and_replicas_of_started_servers_may_change_and_their_arguments_may_not(
    tmp_path: Path,
) -> None:
    run = resumable(tmp_path, rollout={"engine": "vllm", "devices": ["0"]})
    _, changes = changed_recipe(
        run, ["rollout.replicas=2", "rollout.devices=['1', '2']", "rollout.vllm_python=/v"]
    )
    assert [change.key for change in changes] == [
        "rollout.devices", "rollout.replicas", "rollout.vllm_python",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="may change what vLLM writes"):
        changed_recipe(run, ["rollout.engine_args=['--quantization=fp8']"])
    with pytest.raises(ConfigError, match="another engine"):
        changed_recipe(run, ["rollout.engine=sglang", "rollout.urls=['http://x:1']", "rollout.devices=[]"])


def test_a_fully_async_run_may_raise_and_not_lower_its_staleness_and_its_row_limit(tmp_path: Path) -> None:
    """Rows in flight were generated under the old bound. Under a lower one some would be refused as too stale."""
    run = resumable(tmp_path, trainer={"mode": "fully_async", "max_staleness": 2.0}, rollout={"processes": 1})
    _, changes = changed_recipe(
        run,
        [
            "trainer.max_staleness=3",
            "trainer.partial_rollouts=false",
            "trainer.adapt_admission=true",
            "dataplane.max_rows=200000",
        ],
    )
    assert len(changes) == 4
    for lowered in ("trainer.max_staleness=1", "dataplane.max_rows=5000"):
        with pytest.raises(ConfigError, match=r"rows in flight.*it may only be raised"):
            changed_recipe(run, [lowered])
    with pytest.raises(ConfigError, match=r"windows of batch_size · sync_every"):
        changed_recipe(run, ["trainer.sync_every=2"])


def test_a_sync_run_may_lower_its_row_limit(run: RunDir) -> None:
    (change,) = changed_recipe(run, ["dataplane.max_rows=5000"])[1]
    assert change.after == 5000


def test_all_refused_changes_are_reported_together(run: RunDir) -> None:
    with pytest.raises(ConfigError) as caught:
        changed_recipe(run, ["run.seed=1", "loss.kind=reverse_kl"])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("written", [True, False], ids=["[critic]", "no [critic]"])
def test_the_process_and_device_of_a_critic_may_change_and_its_other_settings_may_not(
    tmp_path: Path, written: bool
) -> None:
    table = PPO if written else {key: value for key, value in PPO.items() if key != "critic"}
    (tmp_path / "recipe.json").write_text(json.dumps(parse_recipe(table).model_dump()))
    run = RunDir.open(tmp_path)
    recipe, changes = changed_recipe(run, ["critic.process=true", "critic.device=cpu"])
    assert recipe.critic is not None and recipe.critic.process
    assert [change.key for change in changes] == ["critic.device", "critic.process"]
    assert "where the critic sits" in str(changes[1])
    pool = ["cluster.pools.p.cpus_per_node=1", "cluster.roles.critic=p"]
    assert "where processes sit" in str(changed_recipe(run, pool)[1][-1])
    with pytest.raises(ConfigError, match="critic in the checkpoint") as caught:
        changed_recipe(run, ["critic.process=true", "critic.learning_rate=1e-3"])
    assert len(caught.value.problems) == 1


def test_adding_a_teacher_is_refused(run: RunDir) -> None:
    with pytest.raises(ConfigError, match="scored by the old teachers"):
        changed_recipe(run, ["teachers.third.model=x", "teachers.third.key=third"])


def test_setting_a_key_to_its_present_value_is_not_a_change(run: RunDir) -> None:
    assert changed_recipe(run, ["run.seed=0"])[1] == []


def test_the_tables_of_changed_recipe_name_only_existing_keys() -> None:
    adapted = {**TABLE, "student": {"model": "student", "lora": {"rank": 4}}}
    known = {key for table in (TABLE, adapted, PPO) for key in flatten(parse_recipe(table).model_dump())}
    known |= {
        ".".join([first, "*", *rest])
        for first, _, *rest in (k.split(".") for k in known if k.startswith("teachers."))
    }
    sections = set(Recipe.model_fields)
    for key in (*ACCEPTED, *ONLY_MORE, *REFUSED):
        assert key in known or key in sections or (key.endswith(".*") and key[:-2] in sections), key


def with_secrets(folder: Path) -> tuple[RunDir, Recipe]:
    own = {"my_loops:Think": {"answer_token": "<answer>", "stop_tokens": ["</answer>", "<end>"], "turns": 3}}
    table = TABLE | {
        "teachers": {"add": {"model": "teacher", "prompt": "See https://wiki.org/view?key=42 : {{ prompt }}"}},
        "rollout": {"engine": "vllm", "urls": ["http://me:pw@host:8000"], "agent": "my_loops:Think", "agent_options": own},
        "run": {"dir": str(folder), "note": "a literal <redacted> stays"},
    }  # fmt: skip
    recipe = parse_recipe(table)
    run = RunDir(folder)
    run.write_recipe(recipe.model_dump())
    return run, recipe


def test_secrets_hidden_in_recipe_json_are_restored_on_a_resume(tmp_path: Path) -> None:
    run, recipe = with_secrets(tmp_path)
    shown = run.recipe.read_text()
    for secret in ("<answer>", "</answer>", "=42", "me:pw"):
        assert secret not in shown
    assert run.redacted.stat().st_mode & 0o777 == 0o600
    assert changed_recipe(run, []) == (recipe, [])
    assert settings_of_run(run).produce.rollout == resolve(recipe, gpus=0).produce.rollout
    again, (change,) = changed_recipe(run, ["rollout.urls=['http://you:word@host:9000']"])
    assert again.rollout.agent_options == recipe.rollout.agent_options
    assert "pw" not in str(change) and "word" not in str(change) and "host:9000" in str(change)
    run.write_recipe(again.model_dump())
    assert changed_recipe(run, []) == (again, [])


def test_the_error_for_a_refused_change_does_not_show_a_secret(tmp_path: Path) -> None:
    run, _ = with_secrets(tmp_path)
    with pytest.raises(ConfigError) as refused:
        changed_recipe(run, {"rollout.agent_options.my_loops:Think.answer_token": "other"})
    assert "<answer>" not in str(refused.value) and "answer_token = <redacted>" in str(refused.value)


def test_a_resume_without_the_file_of_hidden_values_is_refused_and_names_their_keys(tmp_path: Path) -> None:
    run, _ = with_secrets(tmp_path)
    run.redacted.unlink()
    with pytest.raises(ConfigError) as refused:
        changed_recipe(run, [])
    keys = [problem.partition(" = ")[0] for problem in refused.value.problems]
    options = "rollout.agent_options.my_loops:Think"
    assert sorted(keys) == [
        f"{options}.answer_token",
        f"{options}.stop_tokens.0",
        f"{options}.stop_tokens.1",
        "rollout.urls.0",
        "run.note",
        "teachers.add.prompt",
    ]
    assert f"{run.redacted} does not have it" in refused.value.problems[0]


def test_a_recipe_without_secrets_has_no_file_of_hidden_values(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_recipe(parse_recipe(TABLE).model_dump())
    assert not run.redacted.exists()
