"""Kinds of teachers combined with faults and schedules; the bits are compared with those of an undisturbed run."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from other_teacher import write_other_teacher
from safetensors.torch import load_file
from small_runs import ASSETS, Command, run_cli, start_cli, write_toml
from transformers import AutoModelForCausalLM

import understudy
from understudy.assembly.teachers.admin import ask_run
from understudy.dataplane.kept_rows import read_columns
from understudy.dataplane.ledger import audit
from understudy.observability.metrics import without_clock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Make = Callable[..., dict[str, Any]]
MODELS = ASSETS / "models"
STUDENT = str(MODELS / "student")
VOCABULARY = json.loads((MODELS / "student" / "config.json").read_text())["vocab_size"]
STEPS = 4
WITH_ANSWER = "{{ answer }}{{ prompt }}"
ASYNC = {"trainer__mode": "fully_async", "trainer__max_staleness": 0}
FROZEN = {
    name: {"model": str(MODELS / f"teacher-{name}"), "key": name, "prompt": WITH_ANSWER}
    for name in ("add", "sort")
}
FOLLOWING = {
    "add": {"model": "student", "version": "live", "key": "add", "prompt": WITH_ANSWER},
    "sort": {"model": "student", "version": "ema", "key": "sort", "prompt": WITH_ANSWER},
}


@pytest.fixture
def small(train_rows: Path, tmp_path: Path) -> Make:
    """Makes recipes of small runs that start their teachers themselves."""

    def make(name: str, teachers: dict[str, Any], **more: Any) -> dict[str, Any]:
        table: dict[str, Any] = {
            "student": {"model": STUDENT},
            "teachers": {key: dict(teacher) for key, teacher in teachers.items()},
            "loss": {"topk": 8},
            "rollout": {"max_new_tokens": 8, "max_batch": 8},
            "data": {
                "train": str(train_rows),
                "reward": "understudy.rollout.rewards.builtin:exact_match",
            },
            "trainer": {"steps": STEPS, "batch_size": 8, "learning_rate": 1e-3, "checkpoint_every": 2},
            "run": {"dir": str(tmp_path / name), "threads": 1, "keep_rows": 1 << 22},
        }
        if any(teacher.get("version") == "ema" for teacher in teachers.values()):
            table["trainer"]["ema_decay"] = 0.5
        for path, value in more.items():
            *sections, key = path.split("__")
            place = table
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return table

    return make


def bits(run: Path, step: int = STEPS) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
    lines = [without_clock(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [{name: value for name, value in line.items() if not name.startswith("async/")} for line in lines]
    return lines, {name: value.numpy().tobytes() for name, value in weights.items()}


def kept_rows_of(run: Path, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    lines = [json.loads(line) for line in (run / "kept_rows" / f"{step:06d}.jsonl").open(encoding="utf-8")]
    return [(line, read_columns(run / "kept_rows", step, line)) for line in lines]


def train_undisturbed(table: dict[str, Any]) -> Path:
    return understudy.train(table, progress=False).dir


def killed_and_resumed(
    table: dict[str, Any], fault: str, disturb: Callable[[Command, Path], None] | None = None
) -> Path:
    run = Path(table["run"]["dir"])
    path = write_toml(run.with_suffix(".toml"), table)
    process = start_cli("train", str(path), "--quiet", fault=fault)
    try:
        if disturb:
            disturb(process, run)
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGKILL, output
    code, output = run_cli("resume", str(run), "--quiet")
    assert code == 0, output
    assert audit(run).balanced
    return run


def wait_for_first_step(process: Command, run: Path) -> None:
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def kill_replica(name: str) -> Callable[[Command, Path], None]:
    """Kills one teacher replica of the run after the first step."""

    def kill(process: Command, run: Path) -> None:
        wait_for_first_step(process, run)
        ready = str(run / "logs" / f".teacher-{name}.ready")
        (replica,) = [one for one in psutil.process_iter(["cmdline"]) if ready in (one.info["cmdline"] or ())]
        replica.kill()

    return kill


def logprobs(model: str, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [P, V] of a plain forward pass."""
    loaded = AutoModelForCausalLM.from_pretrained(MODELS / model, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = loaded(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits, -1).numpy()[positions - 1]


@pytest.mark.parametrize(
    ("teachers", "weights"),
    [
        pytest.param(FROZEN, None, id="frozen"),
        pytest.param(FOLLOWING, None, id="following"),
        pytest.param({**FOLLOWING, "sort": FROZEN["sort"]}, {"add": 0.25, "sort": 0.75}, id="mixture"),
    ],
)
def test_an_async_run_keeps_its_bits_when_a_teacher_replica_and_then_the_trainer_are_killed(
    small: Make, train_rows: Path, tmp_path: Path, teachers: dict[str, Any], weights: dict[str, float] | None
) -> None:
    rows = [json.loads(line) for line in train_rows.read_text().splitlines()[:64]]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(json.dumps({**row, "teacher_weights": weights}) + "\n" for row in rows))
    undisturbed = train_undisturbed(small("calm", teachers, data__train=str(mixed)))
    table = small("killed", teachers, **ASYNC, data__train=str(mixed))
    run = killed_and_resumed(table, "async.after_claim:4", kill_replica("add-0"))
    assert bits(run) == bits(undisturbed)
    assert [line["teacher_prompts"] for line, _ in kept_rows_of(run, 4)] == [
        line["teacher_prompts"] for line, _ in kept_rows_of(undisturbed, 4)
    ]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"rollout__workers": 2}, id="workers"),
        pytest.param({"rollout__workers": 2, "rollout__processes": 2, **ASYNC}, id="workers-engines-async"),
    ],
)
def test_following_teachers_give_the_same_bits_for_rows_of_workers(small: Make, more: dict[str, Any]) -> None:
    assert bits(train_undisturbed(small("other", FOLLOWING, **more))) == bits(
        train_undisturbed(small("one", FOLLOWING))
    )


@pytest.mark.parametrize("more", [{}, ASYNC], ids=["sync", "async"])
def test_a_killed_run_with_an_aligned_and_a_plain_teacher_resumes_to_the_same_bits(
    small: Make, tmp_path: Path, more: dict[str, Any]
) -> None:
    """The aligned teacher has a prompt of its own, rendered with its own chat template."""
    other = {
        "model": write_other_teacher(tmp_path / "other"),
        "key": "add",
        "vocabulary": "align",
        "prompt": WITH_ANSWER,
    }
    teachers = {"add": other, "sort": {**FROZEN["sort"], "prompt": "{{ prompt }}"}}
    undisturbed = train_undisturbed(small("calm", teachers))
    assert {line["teacher"] for line, _ in kept_rows_of(undisturbed, 1)} == {"add", "sort"}
    fault = "async.after_claim:4" if more else "row_journal.after_put:3"
    assert bits(killed_and_resumed(small("killed", teachers, **more), fault)) == bits(undisturbed)


@pytest.mark.parametrize("version", ["start", "live"])
def test_a_lora_student_on_two_ranks_can_be_its_own_teacher(small: Make, version: str) -> None:
    """The teacher is a process of its own: `placement = "trainer"` is refused with several ranks."""
    pytest.importorskip("peft")
    teachers = {"own": {"model": "student", "version": version, "prompt": WITH_ANSWER}}
    lora = {"student__lora": {"rank": 4, "alpha": 8.0}, "loss__topk": VOCABULARY}
    one, two = (
        train_undisturbed(small(f"ranks-{ranks}", teachers, **lora, trainer__ranks=ranks)) for ranks in (1, 2)
    )
    losses = [[line["actor/loss"] for line in bits(run)[0]] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    for step in (1, STEPS):
        line, columns = kept_rows_of(two, step)[0]
        prompt, first = columns["teacher_prompt_own"], int(columns["loss_mask"].argmax())
        written = columns["tokens"][first:]
        at = len(prompt) + np.arange(len(written))
        p_PV = logprobs("student", np.concatenate([prompt, written]), at)
        difference = np.abs(p_PV[np.arange(len(written)), written] - columns["teacher_logprobs"]).max()
        assert (difference < 1e-4) == (version == "start" or step == 1), line["key"]


@pytest.mark.parametrize("more", [{}, ASYNC], ids=["sync", "async"])
def test_a_killed_run_of_given_answers_and_following_teachers_resumes_to_the_same_bits(
    small: Make, more: dict[str, Any]
) -> None:
    """The teacher's prompt shows the answer, whether the student wrote it or the data gave it."""
    shown = {name: {**one, "prompt": "{{ session.text }}{{ prompt }}"} for name, one in FOLLOWING.items()}
    share = {"rollout__off_policy": 0.5, "loss__sft_coef": 0.5}
    undisturbed = train_undisturbed(small("calm", shown, **share))
    rows = kept_rows_of(undisturbed, 1)
    assert {line["origin"] for line, _ in rows} == {"student", "data"}
    fault = "async.after_claim:4" if more else "row_journal.after_put:3"
    run = killed_and_resumed(small("killed", shown, **share, **more), fault)
    assert bits(run) == bits(undisturbed)
    assert [line["teacher_version"] for line, _ in kept_rows_of(run, 4)] == [
        line["teacher_version"] for line, _ in kept_rows_of(undisturbed, 4)
    ]


def test_grpo_advantages_of_a_group_leave_out_its_given_answers(small: Make) -> None:
    """Recomputes every step's loss. The learning rate is so small that every ratio is 1. GRPO's mean and
    deviation are over the student's own sessions of a prompt; given answers have cross-entropy instead of a
    policy gradient."""
    more = {"rollout__n": 4, "trainer__batch_size": 1, "trainer__learning_rate": 1e-30, "rollout__off_policy": 0.4,
            "loss__sft_coef": 0.5, "loss__task_coef": 0.25, "loss__advantage": "grpo", "loss__topk": VOCABULARY,
            "data__reward": "hinting_rewards:hinting", "run__python_path": [str(Path(__file__).parents[1])]}  # fmt: skip
    teachers = {name: {key: one[key] for key in ("model", "key")} for name, one in FROZEN.items()}
    run = understudy.train(small("run", teachers, **more), progress=False)
    informative_groups = 0
    for step in range(1, STEPS + 1):
        rows = kept_rows_of(run.dir, step)
        assert len(rows) == 4
        own = np.array([line["reward"] for line, _ in rows if line["origin"] == "student"])
        informative_groups += 2 <= len(own) < 4 and own.std() > 0
        losses: list[float] = []
        for line, columns in rows:
            tokens, at = columns["tokens"], np.flatnonzero(columns["loss_mask"])
            q_PV, p_PV = (logprobs(model, tokens, at) for model in ("student", f"teacher-{line['teacher']}"))
            term = (np.exp(p_PV) * (p_PV - q_PV)).sum(1)
            if line["origin"] == "data":
                term -= 0.5 * q_PV[np.arange(len(at)), tokens[at]]
            elif len(own) > 1:
                term -= 0.25 * (line["reward"] - own.mean()) / (own.std(ddof=1) + 1e-6)
            losses += term.tolist()
        assert run.metrics[step - 1]["actor/loss"] == pytest.approx(np.mean(losses), abs=1e-5), step
    assert informative_groups, "no group had given answers and own sessions with different rewards"


def test_a_replica_added_to_a_following_teacher_gets_the_current_weights(small: Make) -> None:
    """The first replica is removed after the second was added, so that only the new one scores."""
    steps = 60
    more = {"trainer__steps": steps, "trainer__checkpoint_every": steps}
    table = small("joined", FOLLOWING, **more)
    run = Path(table["run"]["dir"])
    process = start_cli("train", str(write_toml(run.with_suffix(".toml"), table)), "--quiet")
    try:
        wait_for_first_step(process, run)
        assert ask_run(run, {"do": "add", "teacher": "add"}) == {"added": "1"}
        assert ask_run(run, {"do": "remove", "teacher": "add", "replica": "0"})
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output
    undisturbed = train_undisturbed(small("calm", FOLLOWING, **more))
    assert bits(run, steps) == bits(undisturbed, steps)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["perf/teacher/add/1/share"] == 1


@pytest.mark.parametrize(("checkpoint_every", "killed_at", "steps"), [(1, 4, 8), (5, 9, 10)])
def test_lagging_and_averaged_teachers_have_the_right_versions_after_a_resume(
    small: Make, checkpoint_every: int, killed_at: int, steps: int
) -> None:
    """The run publishes after every second update. It is resumed from the checkpoint of update 3, or from that
    of update 5 after publishes 6 and 8, when the lagging teacher needs the weights of update 2."""
    teachers = {**FOLLOWING, "add": {**FOLLOWING["add"], "version": 1}}
    more = {"trainer__mode": "fully_async", "trainer__max_staleness": 1.0, "trainer__sync_every": 2,
            "trainer__checkpoint_every": checkpoint_every, "trainer__keep_checkpoints": 9, "trainer__steps": steps}  # fmt: skip
    run = killed_and_resumed(small("killed", teachers, **more), f"async.after_claim:{killed_at}")
    for step in range(1, steps + 1):
        published = (step - 1) // 2 * 2
        for line, _ in kept_rows_of(run, step):
            newest = published if line["teacher"] == "sort" else max(0, published - 2)
            assert max(0, newest - 2) <= line["teacher_version"] <= newest, (step, line["key"])
