"""Kinds of teachers in whole runs: external servers, mixtures, replicas that are added and removed."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from completion_servers import FakeCompletions, running
from small_runs import ASSETS, TOKEN_VARIABLE, start_cli, write_toml

import understudy
from understudy.assembly.teachers.admin import ask_run
from understudy.cli.main import main
from understudy.errors import CheckpointError, TeacherError, UnderstudyError
from understudy.observability.rundir import RunDir
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.trainers.checkpoints import verify_teachers

Make = Callable[..., dict[str, Any]]
ADD = ASSETS / "models" / "teacher-add"
ROWS = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()]


@pytest.fixture
def add_rows(tmp_path: Path) -> str:
    return rows_file(tmp_path, [row for row in ROWS if row["data_source"] == "add"][:32])


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module", params=["vllm", pytest.param("echo with ids", marks=pytest.mark.slow)])
def completions_server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    with running(FakeCompletions(ADD, request.param)) as url:
        yield request.param, url


def external(url: str, **changes: Any) -> dict[str, Any]:
    return {"add": {"model": str(ADD), "placement": "external", "urls": [url], **changes}}


def test_a_completions_server_as_teacher_gives_the_losses_of_our_own_server(
    recipe: Make, completions_server: tuple[str, str], add_rows: str, teacher_urls: dict[str, str]
) -> None:
    flavour, url = completions_server
    served = (
        "served" if flavour == "echo with ids" else str(ADD)
    )  # a server that reports no `root` is known by its served name alone
    shared = {"data__train": add_rows, "loss__topk": 4, "trainer__steps": 2}
    theirs = understudy.train(
        recipe("theirs", teachers=external(f"{url}/v1", model=served), **shared), progress=False
    )
    ours = understudy.train(
        recipe("ours", teachers=external(teacher_urls["add"], token_env=TOKEN_VARIABLE), **shared),
        progress=False,
    )
    for step in range(2):
        a, b = theirs.metrics[step], ours.metrics[step]
        assert a["actor/loss"] == pytest.approx(b["actor/loss"], abs=1e-5)
        assert a["teacher/add/share"] == 1.0
    log = (theirs.dir / "logs" / "trainer.log").read_text()
    assert "shows neither its token→id map nor its weights" in log and "batches by arrival" in log
    assert "shows neither" not in (ours.dir / "logs" / "trainer.log").read_text()


def test_a_signal_topk_or_model_that_a_completions_server_lacks_is_refused(
    recipe: Make, completions_server: tuple[str, str], add_rows: str
) -> None:
    flavour, url = completions_server
    served = "served" if flavour == "echo with ids" else str(ADD)
    backend = "openai" if flavour == "echo with ids" else "vllm"
    table = recipe("never", data__train=add_rows, teachers=external(url, model=served, backend=backend))
    with pytest.raises(
        UnderstudyError, match=rf"cannot give hidden; its {backend} backend offers sampled, topk"
    ):
        understudy.train({**table, "loss": {"kind": "forward_kl", "signal": "hidden"}}, progress=False)
    table["teachers"]["add"]["backend"] = "auto"  # the backend is known only after the server was asked
    with pytest.raises(UnderstudyError, match=r"cannot give hidden; its .* backend offers sampled, topk"):
        understudy.train({**table, "loss": {"kind": "forward_kl", "signal": "hidden"}}, progress=False)
    table["run"]["dir"] += "-again"
    with pytest.raises(UnderstudyError, match=r"gives at most \d+ candidates; the loss asks for 30"):
        understudy.train({**table, "loss": {"topk": 30}}, progress=False)
    table["run"]["dir"] += "-and-again"
    other = external(url, model="somebody/else", backend=backend)
    with pytest.raises(UnderstudyError, match="serves no model 'somebody/else'; it serves served"):
        understudy.train({**table, "teachers": other}, progress=False)


@pytest.mark.slow
def test_the_hidden_signal_gives_the_loss_of_a_topk_as_wide_as_the_vocabulary(
    recipe: Make, add_rows: str, teacher_urls: dict[str, str]
) -> None:
    """With hidden states the trainer applies the teacher's head, so every token of the vocabulary counts."""
    teachers = external(teacher_urls["add"], token_env=TOKEN_VARIABLE)
    vocabulary = json.loads((ADD / "config.json").read_text())["vocab_size"]
    hidden = recipe("hidden", data__train=add_rows, teachers=teachers, trainer__steps=1)
    hidden["loss"] = {"kind": "forward_kl", "signal": "hidden"}
    wide = recipe("wide", data__train=add_rows, teachers=teachers, trainer__steps=1, loss__topk=vocabulary)
    losses = [understudy.train(table, progress=False).last["actor/loss"] for table in (hidden, wide)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)  # hidden states travel as bfloat16


def test_metrics_name_an_external_teacher_as_the_recipe_does(
    recipe: Make, add_rows: str, teacher_urls: dict[str, str]
) -> None:
    """Its server calls itself "add". The head for its hidden states is found by the recipe's name too."""
    teachers = {"tutor": external(teacher_urls["add"], token_env=TOKEN_VARIABLE)["add"]}
    table = recipe(data__train=add_rows, teachers=teachers, trainer__steps=1, data__reward=None)
    last = understudy.train(
        {**table, "loss": {"kind": "forward_kl", "signal": "hidden"}}, progress=False
    ).last
    assert last["teacher/tutor/rows"] == 16 and not [name for name in last if name.startswith("teacher/add/")]


def mixed_rows(weights: list[Any]) -> list[dict[str, Any]]:
    return [{**row, "teacher_weights": w} for row, w in zip(ROWS, weights, strict=False)]


@pytest.mark.parametrize("signal", ["topk", "sampled"])
def test_rows_with_teacher_weights_are_scored_by_a_mixture_of_teachers(
    recipe: Make, tmp_path: Path, signal: str, teacher_urls: dict[str, str]
) -> None:
    weights: list[Any] = [{"add": 0.7, "sort": 0.3}] * 6 + [{"add": 1, "sort": 0}] * 5 + [None] * 5
    data = rows_file(tmp_path, mixed_rows(weights))
    loss = {"signal": signal, **({"topk": 8} if signal == "topk" else {"kind": "k3"})}
    tables = [
        recipe(name, data__train=data, data__shuffle=False, trainer__steps=1) for name in ("one", "two")
    ]
    runs = [understudy.train({**table, "loss": loss}, progress=False) for table in tables]
    last = runs[0].last
    assert last["teacher/add+sort/rows"] == 6 and last["teacher/add+sort/share"] == 6 / 16
    assert last["teacher/add/rows"] + last["teacher/sort/rows"] == 10
    assert all(runs[1].last[name] == last[name] for name in ("actor/loss", "teacher/add+sort/kl")), (
        "a second run should give the same bits"
    )


def test_a_row_whose_mixture_misspells_a_teacher_becomes_a_dead_letter_with_a_suggestion(
    recipe: Make, tmp_path: Path
) -> None:
    data = rows_file(tmp_path, mixed_rows([{"adds": 1.0}] + [{"add": 1.0, "sort": 1.0}] * 15))
    run = understudy.train(
        recipe(data__train=data, trainer__steps=1, trainer__max_dead_letters=0.2), progress=False
    )
    (letter,) = [
        json.loads(line) for line in (run.dir / "dataplane" / "dead_letters.jsonl").read_text().splitlines()
    ]
    assert "a mixture names 'adds'" in letter["reason"] and "the nearest is 'add'" in letter["reason"]
    assert run.last["teacher/add+sort/rows"] == 15


def test_check_refuses_impossible_mixtures_contexts_and_pools(
    recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows_file(tmp_path, mixed_rows([{"add": 1.0, "sort": 1.0}] * 4))

    def refusal(name: str, **overrides: Any) -> str:
        table = recipe("never", data__train=data, **overrides)
        table["teachers"] = {
            name: {"model": str(ASSETS / "models" / f"teacher-{name}"), "key": name}
            for name in ("add", "sort")
        } | overrides.get("teachers", {})
        assert main(["check", str(write_toml(tmp_path / f"{name}.toml", table))]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "data.train has 4 rows with a mixture" in refusal(
        "h", loss={"kind": "forward_kl", "signal": "hidden"}
    )
    closed = {
        "sort": {
            "model": "x",
            "key": "sort",
            "placement": "external",
            "urls": ["http://x"],
            "backend": "vllm",
        }
    }
    assert "which sort (backend = 'vllm') cannot tell; use 'sampled'" in refusal("t", teachers=closed)
    short = {"add": {"model": str(ADD), "key": "add", "context_length": 12}}
    message = refusal("c", teachers=short)
    assert "teachers.add holds 12 tokens; " in message and "+ 8 (rollout.max_new_tokens) + 1 = " in message
    assert "of its 4 rows do not fit" in message
    long = {"add": {"model": str(ADD), "key": "add", "context_length": 1 << 20}}
    assert "teachers.add.context_length = 1048576: teacher-add holds" in refusal("l", teachers=long)
    pool = {"add": {"model": str(ADD), "key": "add", "placement": "pool", "pool": "p", "replicas": 3}}
    cluster = {"pools": {"p": {"gpus_per_node": 2}}}
    assert "pool p has 1 node × 2 GPUs = 2; teacher-add 3 × 1 = 3: 1 too many" in refusal(
        "p", teachers=pool, cluster=cluster
    )


@pytest.fixture
def two_replicas(recipe: Make, add_rows: str) -> Callable[..., dict[str, Any]]:
    def make(name: str = "run", **overrides: Any) -> dict[str, Any]:
        table = recipe(name, data__train=add_rows, trainer__checkpoint_every=1000, **overrides)
        table["teachers"] = {"add": {"model": str(ADD), "replicas": 2, "cache_bytes": 1 << 20}}
        return table

    return make


@pytest.mark.slow
@pytest.mark.timeout(600)  # three processes start one after another, on a machine that may be busy
def test_replicas_are_added_and_removed_while_the_run_continues(
    two_replicas: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = two_replicas(trainer__steps=4000)
    folder = Path(table["run"]["dir"])
    training = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    try:
        until = time.monotonic() + 240
        while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
            assert time.monotonic() < until and training.poll() is None
            time.sleep(0.1)
        assert ask_run(folder, {"do": "add", "teacher": "add"}) == {"added": "2"}
        assert main(["teachers", str(folder), "remove", "add", "0"]) == 0
        assert "replica 0 of teacher add left" in capsys.readouterr().out
        deadline = time.monotonic() + 120
        while True:
            replicas = {one["name"]: one for one in ask_run(folder, {"do": "list"})["add"]}
            if replicas["2"]["requests"] > 3:
                break
            assert time.monotonic() < deadline, replicas
            time.sleep(0.2)
        assert replicas.keys() == {"1", "2"} and all(one["state"] == "healthy" for one in replicas.values())
        assert main(["teachers", str(folder)]) == 0
        assert "healthy" in capsys.readouterr().out
        for request, message in [
            ({"do": "remove", "teacher": "add", "replica": "7"}, "has no replica '7'"),
            ({"do": "add", "teacher": "ad"}, "no teacher 'ad' in this run; teachers are add"),
            ({"do": "add", "teacher": "add", "url": "http://x"}, "leave the address out"),
            ({"do": "dance"}, "expected list, add or remove"),
        ]:
            with pytest.raises(TeacherError, match=message):
                ask_run(folder, request)
        line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert line["perf/teacher/add/replicas"] == 2 and line["perf/teacher/add/2/share"] > 0
        for name in (
            "latency_mean",
            "latency_p95",
            "queue_depth",
            "retries",
            "ejections",
            "hedges",
            "cache_hits",
        ):
            assert f"perf/teacher/add/{name}" in line
        assert line["teacher/add/share"] == 1.0 and "teacher/add/kl" in line
        training.send_signal(signal.SIGINT)
        output, _ = training.communicate(timeout=120)
        assert training.returncode == 130, output
    finally:
        training.kill()
        training.wait()
    with pytest.raises(TeacherError, match="is not running"):
        ask_run(folder, {"do": "list"})


@pytest.mark.slow
def test_verify_teachers_refuses_teachers_that_changed_since_the_checkpoint(
    two_replicas: Callable[..., dict[str, Any]],
) -> None:
    run = understudy.train(two_replicas(trainer__steps=1), progress=False)
    saved = CheckpointStore(RunDir.open(run.dir).checkpoints, 2).load().extra["teachers"]
    verify_teachers(saved, saved)
    (name,) = saved
    for change, message in [
        ({"weights_sha256": "0" * 64}, "changed since this run began"),
        ({"dtype": "bfloat16"}, "changed since this run began"),
        ({"fixed_scores": [score + 0.1 for score in saved[name]["fixed_scores"]]}, "moved by 0.1 nats"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            verify_teachers(saved, {name: {**saved[name], **change}})
    with pytest.raises(CheckpointError, match="teacher add of this run is gone"):
        verify_teachers(saved, {})


@pytest.mark.slow
def test_a_teacher_over_two_processes_gives_the_loss_of_one_process(
    two_replicas: Callable[..., dict[str, Any]],
) -> None:
    losses = []
    for ranks in (1, 2):
        table = two_replicas(f"ranks-{ranks}", trainer__steps=1)
        table["teachers"]["add"] = {"model": str(ADD), "tensor_parallel": ranks, "hedge_after_seconds": 30}
        losses.append(understudy.train(table, progress=False).last["actor/loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
