"""The fully async trainer: equal to the sync trainer at staleness 0; beyond it staleness is bounded and every row is
trained once, also after kills."""

import contextlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file
from small_runs import call_cli, run_cli, start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit
from understudy.errors import DataError
from understudy.observability.metrics import read_metrics, without_clock

Make = Callable[..., dict[str, Any]]
ASYNC = {"trainer__mode": "fully_async"}
FILTERED = {
    "rollout__n": 3, "rollout__filter_groups": True, "rollout__max_refills": 50, "loss__task_coef": 0.5,
    "data__reward": "small_rewards:coarse", "trainer__batch_size": 5,
}  # fmt: skip
MORE_POINTS = ("after_claim:1", "after_claim:3", "after_update:2", "after_publish:2", "after_metrics:5")


@pytest.fixture(autouse=True)
def own_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs in processes of their own import `small_rewards`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def weights_of(run: Path, step: int = 4) -> dict[str, Any]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


@pytest.mark.parametrize("more", [{}, pytest.param(FILTERED, marks=pytest.mark.slow)])
def test_staleness_0_gives_the_bits_of_the_sync_trainer(recipe: Make, more: dict[str, Any]) -> None:
    changes = {"rollout__n": 2, "trainer__eval_every": 2, "trainer__eval_samples": 8, **more}
    changes["data__eval"] = recipe()["data"]["train"]
    sync = understudy.train(recipe("sync", **changes), progress=False)
    asynchronous = understudy.train(
        recipe("async", trainer__max_staleness=0, **changes, **ASYNC), progress=False
    )
    for one, other in zip(sync.metrics, asynchronous.metrics, strict=True):
        mine = {key: value for key, value in without_clock(other).items() if not key.startswith("async/")}
        assert mine == without_clock(one)
        assert other.get("async/staleness/max", 0) == 0
    left, right = weights_of(sync.dir), weights_of(asynchronous.dir)
    assert all((left[name] == right[name]).all() for name in left)


@pytest.mark.parametrize(
    ("staleness", "every", "partial"),
    [
        (0.5, 1, True),
        (1.0, 3, False),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [(1.0, 1, False), (2.0, 1, True), (0.0, 2, True)]
        ),
    ],
)
def test_every_row_is_trained_once_and_within_the_staleness_bound(
    recipe: Make, staleness: float, every: int, partial: bool
) -> None:
    """With 5 steps and 2 or 3 updates per publish, the last window is short."""
    run = understudy.train(
        recipe(
            trainer__steps=5, trainer__max_staleness=staleness, trainer__sync_every=every,
            trainer__partial_rollouts=partial, rollout__n=2, trainer__batch_size=6, **ASYNC,
        ),
        progress=False,
    )  # fmt: skip
    report = audit(run.dir)
    assert report.balanced and report.trained == 60 and report.per_step == dict.fromkeys(range(1, 6), 12)
    ages = [line["async/staleness/max"] for line in run.metrics]
    assert max(ages) <= -(-staleness // 1)
    if not partial:
        assert all(line["async/partial_rollouts"] == 0 for line in run.metrics)
    for line in run.metrics:
        assert 0 <= line["perf/async/trainer_idle"] <= 1
        rows = sum(value for key, value in line.items() if key.startswith("async/staleness/rows/"))
        assert rows == 12


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_generations_continue_after_a_publish_with_kept_keys_and_values(recipe: Make, processes: int) -> None:
    run = understudy.train(
        recipe(
            rollout__recompute_kv=False, rollout__processes=processes, rollout__max_batch=2, rollout__max_new_tokens=100, rollout__temperature=8.0,
            trainer__max_staleness=1.0, trainer__batch_size=8, trainer__steps=6, **ASYNC,
        ),
        progress=False,
    )  # fmt: skip
    report = audit(run.dir)
    assert report.balanced and report.trained == 48
    assert max(line["async/staleness/max"] for line in run.metrics) == 1
    assert sum(line["async/partial_rollouts"] for line in run.metrics) > 0, (
        "no rollout was in progress at a publish"
    )


def test_an_async_run_trains_on_rewards_and_distillation_together(recipe: Make) -> None:
    run = understudy.train(
        recipe(loss__task_coef=0.5, rollout__n=4, trainer__batch_size=4, trainer__steps=3, **ASYNC),
        progress=False,
    )
    assert run.steps == 3 and audit(run.dir).trained == 48


@pytest.mark.slow
def test_prompts_without_signal_are_replaced_within_their_window(recipe: Make) -> None:
    run = understudy.train(recipe(trainer__max_staleness=1.0, **FILTERED, **ASYNC), progress=False)
    assert_windows_are_full(run.dir)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("max_rows", [20, pytest.param(28, marks=pytest.mark.slow)])
def test_replacement_prompts_are_admitted_before_a_later_window_when_max_rows_is_small(
    recipe: Make, max_rows: int
) -> None:
    """Windows have 15 rows. With max_rows = 20, the next window waits for admission while prompts of this one
    are replaced. With 28, the next window could wrongly take the room of the very rows that are being replaced."""
    run = understudy.train(
        recipe(trainer__max_staleness=1.0, dataplane__max_rows=max_rows, **FILTERED, **ASYNC), progress=False
    )
    assert_windows_are_full(run.dir)
    assert sum(line["rows/evicted"] for line in run.metrics) == audit(run.dir).evicted
    assert all(line["rows/evicted"] == line.get("rows/evicted/no_signal", 0) for line in run.metrics)
    assert all(line["perf/async/slots"] == max_rows // 3 for line in run.metrics)
    assert all(line["perf/queue_depth"] <= max_rows for line in run.metrics)
    log = (run.dir / "logs" / "trainer.log").read_text()
    assert log.count(f"dataplane.max_rows = {max_rows} lets producers run") == 1
    names = {json.loads(line)["name"] for line in (run.dir / "spans.jsonl").read_text().splitlines()}
    assert "issue rows" in names


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["async.after_claim:2", "async.after_ack:3", "async.after_publish:3"])
def test_a_run_killed_while_prompts_are_replaced_resumes_with_full_windows(
    recipe: Make, tmp_path: Path, fault: str
) -> None:
    table = recipe(trainer__max_staleness=1.0, **FILTERED, **ASYNC)
    code, output = run_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), fault=fault)
    assert code == -9, output
    code, output = run_cli("resume", table["run"]["dir"])
    assert code == 0, output
    assert_windows_are_full(Path(table["run"]["dir"]))


def test_a_resume_at_staleness_0_gives_the_same_bits_after_prompts_were_replaced(recipe: Make) -> None:
    """The first window after the checkpoint begins after the replacement prompts of the window before it."""
    whole = understudy.train(recipe("whole", trainer__max_staleness=0, **FILTERED, **ASYNC), progress=False)
    assert whole.metrics[1]["rollout/refills"] > 0
    half = understudy.train(
        recipe("half", trainer__max_staleness=0, trainer__steps=2, **FILTERED, **ASYNC), progress=False
    )
    resumed = understudy.resume(half.dir, trainer__steps=4, progress=False)
    assert list(map(without_clock, resumed.metrics)) == list(map(without_clock, whole.metrics))
    left, right = weights_of(whole.dir), weights_of(resumed.dir)
    assert all((left[name] == right[name]).all() for name in left)


@pytest.mark.slow
def test_a_killed_sync_run_resumes_with_the_same_replacement_prompts(recipe: Make, tmp_path: Path) -> None:
    """In fast mode, rows in flight are kept. The data position must pass their prompts, or the next step would
    draw them."""
    more = {
        **FILTERED,
        "run__determinism": "fast",
        "trainer__checkpoint_every": 1,
        "trainer__async_save": False,
    }
    whole = understudy.train(recipe("whole", **more), progress=False)
    table = recipe("killed", **more)
    code, output = run_cli(
        "train", str(write_toml(tmp_path / "recipe.toml", table)), fault="sync.after_ack:2"
    )
    assert code == -9, output
    resumed = understudy.resume(table["run"]["dir"], progress=False)

    def replaced(metrics: list[dict[str, Any]]) -> list[tuple[float, float]]:
        return [(line["rollout/filtered_prompts"], line["rollout/refills"]) for line in metrics]

    assert replaced(whole.metrics)[1][1] > 0
    assert replaced(resumed.metrics) == replaced(whole.metrics)


def assert_windows_are_full(run: Path) -> None:
    """Every window is full, every prompt was trained or filtered, and no row is older than one publish."""
    report = audit(run)
    assert report.balanced and report.in_flight == 0 and report.evicted > 0
    assert report.per_step == dict.fromkeys(range(1, 5), 15)
    assert all(reason.startswith("no signal") for reason in report.reasons)
    lines = read_metrics(run / "metrics.jsonl")
    assert sum(line["rollout/filtered_prompts"] for line in lines) > 0
    assert max(line["async/staleness/max"] for line in lines) <= 1
    assert all(1 / 3 <= line["critic/score/mean"] <= 2 / 3 for line in lines), "equal rewards were trained on"


@pytest.mark.parametrize(
    "fault",
    ["async.after_ack:3", *(pytest.param(f"async.{point}", marks=pytest.mark.slow) for point in MORE_POINTS)],
)
def test_a_killed_and_resumed_async_run_trains_every_prompt_once(
    recipe: Make, tmp_path: Path, fault: str
) -> None:
    table = recipe(trainer__max_staleness=1.0, rollout__n=2, trainer__steps=6, **ASYNC)
    path = write_toml(tmp_path / "recipe.toml", table)
    code, output = run_cli("train", str(path), fault=fault)
    assert code == -9, output
    code, output = call_cli("resume", table["run"]["dir"])
    assert code == 0, output
    run = Path(table["run"]["dir"])
    report = audit(run)
    assert report.balanced and report.trained == 6 * 16 * 2
    assert report.per_step == dict.fromkeys(range(1, 7), 32)
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert max(line["async/staleness/max"] for line in lines) <= 1


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_without_rows_ends_the_run_with_an_error_that_names_its_window(
    recipe: Make, tmp_path: Path, every: int
) -> None:
    """The rows of a window of several steps belong to all of them, and earlier steps may have trained some."""
    lines = Path(recipe()["data"]["train"]).read_text().splitlines()[:16]
    rows = [{**json.loads(line), "trouble": int(place >= 4)} for place, line in enumerate(lines)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = recipe(
        data__train=str(tmp_path / "rows.jsonl"), data__shuffle=False, data__reward="small_rewards:broken_held_out",
        trainer__batch_size=4, trainer__sync_every=every, trainer__max_staleness=0,
        trainer__max_dead_letters=1.0, **ASYNC,
    )  # fmt: skip
    with pytest.raises(DataError) as error:
        understudy.train(table, progress=False)
    expected = {
        1: "every row of step 2 failed",
        2: "step 2 has no row: those of steps 1 to 2, which are one window (trainer.sync_every = 2), failed or were trained by the steps "
        "before it",
    }[every]
    assert str(error.value).startswith(f"{expected}; the reasons are in ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_is_trained_once_when_random_processes_are_killed(
    recipe: Make, tmp_path: Path, seed: int
) -> None:
    """Kills the launcher, a teacher or the rollout process at random times, up to five times, and resumes where
    needed."""
    chance = random.Random(seed)
    table = recipe(
        trainer__max_staleness=chance.choice([0.5, 1.0, 2.0]), rollout__n=2, rollout__processes=1, trainer__steps=8,
        trainer__partial_rollouts=chance.random() < 0.5, **ASYNC,
    )  # fmt: skip
    for teacher in table["teachers"].values():
        for key in ("placement", "urls", "token_env"):
            del teacher[key]
    run = Path(table["run"]["dir"])
    arguments = ["train", str(write_toml(tmp_path / "r.toml", table)), "--quiet"]
    process = start_cli(*arguments)
    for _ in range(5):
        deadline = time.monotonic() + chance.uniform(2.0, 15.0)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.poll() is not None:
            break
        launcher = psutil.Process(process.pid)
        victim = chance.choice([launcher, *launcher.children()])
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
        if victim == launcher:
            process.communicate()
            if (run / "recipe.json").exists():
                arguments = ["resume", str(run), "--quiet"]
            process = start_cli(*arguments)
    output, _ = process.communicate(timeout=240)
    while process.returncode == 2:
        # A child that is killed while the run starts ends the start with an error that names it; no row is lost.
        assert "was killed by SIGKILL" in output, output
        process = start_cli("resume", str(run), "--quiet")
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    report = audit(run)
    assert report.balanced and report.trained == 8 * 16 * 2
    assert report.per_step == dict.fromkeys(range(1, 9), 32)
    bound = -(-table["trainer"]["max_staleness"] // 1)
    assert max(line["async/staleness/max"] for line in read_metrics(run / "metrics.jsonl")) <= bound


def test_check_refuses_settings_that_contradict_the_async_schedule(recipe: Make, tmp_path: Path) -> None:
    table = recipe(run__determinism="full", trainer__max_staleness=1.0, **ASYNC)
    for name in table["teachers"]:
        table["teachers"][name] |= {"placement": "pool", "pool": "p", "urls": []}
        table["teachers"][name].pop("token_env")
    table["cluster"] = {"pools": {"p": {"cpus_per_node": 4}}, "roles": {"student": "p"}}
    code, output = call_cli("check", str(write_toml(tmp_path / "a.toml", table)))
    assert code == 2 and "run.determinism = 'full'" in output and "share no pool" in output
    code, output = call_cli("check", str(write_toml(tmp_path / "b.toml", recipe(trainer__sync_every=2))))
    assert code == 2 and "trainer.sync_every belongs to trainer.mode = 'fully_async'" in output
    table = recipe(trainer__sync_every=2, **FILTERED, **ASYNC)
    code, output = call_cli("check", str(write_toml(tmp_path / "c.toml", table)))
    assert code == 2 and "set trainer.sync_every = 1" in output


@pytest.mark.slow
def test_an_async_run_trains_with_its_teacher_in_a_pool(recipe: Make) -> None:
    table = recipe(trainer__steps=2, cluster={"pools": {"scoring": {"cpus_per_node": 1}}}, **ASYNC)
    model = table["teachers"]["add"]["model"]
    table["teachers"] = {"add": {"model": model, "placement": "pool", "pool": "scoring"}}
    run = understudy.train(table, progress=False)
    report = audit(run.dir)
    assert report.balanced and report.per_step == {1: 16, 2: 16}
    assert run.last["teacher/add/rows"] == 16


def test_doctor_reports_that_a_finished_run_has_ended(recipe: Make) -> None:
    run = understudy.train(recipe(trainer__steps=2, **ASYNC), progress=False)
    waits = json.loads((run.dir / "waits.json").read_text())
    assert waits["waiting"] == [] and waits["status"] == "ended"
    code, output = call_cli("doctor", str(run.dir))
    assert code == 0 and "ended" in output
