"""The frozen base of a LoRA student as its teacher, beside the trainer or the engine: its scores, its memory, kills, refusals."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import ASSETS, call_cli, run_cli, write_toml
from transformers import AutoModelForCausalLM

import understudy
from understudy.assembly.teachers.launchers import EngineTeachers
from understudy.config import parse_recipe
from understudy.dataplane.kept_rows import read_columns
from understudy.errors import ConfigError
from understudy.observability.metrics import without_clock
from understudy.planning.processes import PROCESS_BYTES, plan_processes
from understudy.planning.seating import seat
from understudy.policy.lora import LoraSettings
from understudy.policy.policy import Policy
from understudy.policy.step import PolicySettings
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.replica.in_process import LoraBaseReplica, LoraBaseTeacher
from understudy.teacher.scoring.model import FrozenModel
from understudy.trainers.models import load_model
from understudy.types.scores import ScoreItem, Signal

Make = Callable[..., dict[str, Any]]
STUDENT = ASSETS / "models" / "student"
VOCABULARY = json.loads((STUDENT / "config.json").read_text())["vocab_size"]


@pytest.fixture(autouse=True)
def _peft() -> None:
    pytest.importorskip("peft")


@pytest.fixture
def make_recipe(train_rows: Path, tmp_path: Path) -> Make:
    def make(name: str, placement: str = "trainer", **more: Any) -> dict[str, Any]:
        base = {"model": "student", "placement": placement, "prompt": "{{ answer }}{{ prompt }}"}
        table: dict[str, Any] = {
            "student": {"model": str(STUDENT), "lora": {"rank": 4, "alpha": 8.0}},
            "teachers": {"base": base},
            "loss": {"topk": VOCABULARY},
            "rollout": {"max_new_tokens": 8, "max_batch": 8},
            "data": {"train": str(train_rows)},
            "trainer": {"steps": 3, "batch_size": 8, "learning_rate": 1e-2, "checkpoint_every": 1},
            "run": {"dir": str(tmp_path / name), "threads": 1, "keep_rows": 1 << 22},
        }
        for path, value in more.items():
            *sections, key = path.split("__")
            place = table
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return table

    return make


def logprobs(tokens: np.ndarray) -> np.ndarray:
    """float64 [T, V] of a plain forward pass of the student before training."""
    model = AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float64).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0], -1).numpy()


def bits(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / "step-000003" / "model.safetensors")
    lines = [without_clock(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines, {name: value.numpy().tobytes() for name, value in weights.items()}


def test_base_teacher_scores_equal_a_plain_forward_of_the_base_in_every_step(make_recipe: Make) -> None:
    """Also after the adapters have changed. A replica in a process of its own gives the same bits."""
    run = understudy.train(make_recipe("here"), progress=False).dir
    for step in (1, 3):
        lines = [
            json.loads(line) for line in (run / "kept_rows" / f"{step:06d}.jsonl").open(encoding="utf-8")
        ]
        for line in lines[:3]:
            columns = read_columns(run / "kept_rows", step, line)
            prompt, first = columns["teacher_prompt_base"], int(columns["loss_mask"].argmax())
            written = columns["tokens"][first:]
            p_PV = logprobs(np.concatenate([prompt, written]))[len(prompt) - 1 : -1]
            assert np.abs(p_PV[np.arange(len(written)), written] - columns["teacher_logprobs"]).max() < 1e-4
            best = np.take_along_axis(p_PV, columns["teacher_ids"].astype(int), 1)
            assert np.abs(np.exp(best) - np.exp(columns["teacher_topk_logprobs"])).max() < 1e-5
    adapters = load_file(run / "checkpoints" / "step-000003" / "model.safetensors")
    assert all("lora_" in name for name in adapters)
    assert max(float(tensor.abs().max()) for name, tensor in adapters.items() if "lora_B" in name) > 1e-3
    assert not list((run / "logs").glob("teacher-*")), "no process was started for it"
    assert bits(run) == bits(understudy.train(make_recipe("apart", "standalone"), progress=False).dir)


def test_the_base_teacher_shares_the_student_s_tensors_and_ignores_its_adapters(make_recipe: Make) -> None:
    """With changed adapters, it still scores as the student does without them."""
    student = load_model(str(STUDENT), device="cpu")
    twin = student.sharing_copy().model.eval()
    base = FrozenModel(twin, str(STUDENT), "float32", student.device, student.context)
    policy = Policy(student.model, PolicySettings(lora=LoraSettings(rank=4, alpha=8.0)))
    theirs = {name: tensor.data_ptr() for name, tensor in policy.model.named_parameters()}
    for name, tensor in twin.named_parameters():
        layer, _, kind = name.rpartition(".")
        assert tensor.data_ptr() in (theirs.get(name), theirs.get(f"{layer}.base_layer.{kind}")), name
    with torch.no_grad():
        for name, tensor in policy.model.named_parameters():
            if "lora_B" in name:
                tensor.normal_(std=0.1)
    tokens = np.arange(6, 26, dtype=np.int32)
    teacher = parse_recipe(make_recipe("run")).teachers["base"]

    async def scored() -> np.ndarray:
        launcher = LoraBaseTeacher(LoraBaseReplica.of("base", teacher, "by_request"), "token", base)
        endpoint = await launcher.start("0")
        assert launcher.alive("0")
        async with ReplicaClient(endpoint.url, endpoint.token, teacher="base") as client:
            positions = np.arange(1, 20, dtype=np.int32)
            (found,) = await client.score([ScoreItem("row", tokens, positions, Signal.SAMPLED, 0)])
        await launcher.stop("0")
        assert not launcher.alive("0")
        return (await found.fetch()).sampled_logprobs

    def plain() -> np.ndarray:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            logits = policy.model.eval()(ids).logits[0, :-1].double()
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()

    found, with_adapters = asyncio.run(scored()), plain()
    for layer in policy.model.modules():
        if hasattr(layer, "base_layer"):
            layer.enable_adapters(False)
    assert np.abs(found - plain()).max() < 2e-6
    assert np.abs(found - with_adapters).max() > 0.05, "scores with the adapters should differ"


def test_two_teachers_that_share_one_base_both_score_correctly_in_turn(make_recipe: Make) -> None:
    """Each switches the attention implementation of its own modules. When they shared modules, the second
    teacher scored packed rows with the attention for padded rows, after the first had scored a longer row, and
    was 6 nats off."""
    student = load_model(str(STUDENT), device="cpu")
    base = FrozenModel(
        student.sharing_copy().model.eval(), str(STUDENT), "float32", student.device, student.context
    )
    teacher = parse_recipe(make_recipe("run")).teachers["base"]
    draw = np.random.default_rng(0)
    head = draw.integers(6, 26, 40)

    def row(number: int, tokens: np.ndarray, first: int) -> ScoreItem:
        positions = np.arange(first, len(tokens), dtype=np.int32)
        return ScoreItem(f"row{number}", tokens.astype(np.int32), positions, Signal.SAMPLED, 0)

    group = [row(i, np.concatenate([head, draw.integers(6, 26, 6)]), 40) for i in range(24)]
    longer = [row(24, draw.integers(6, 26, 63), 3)]

    def largest_difference(rows: list[ScoreItem], scores: list[Any]) -> float:
        known = [logprobs(one.tokens)[one.positions - 1, one.tokens[one.positions]] for one in rows]
        return max(float(np.abs(a - b).max()) for a, b in zip(known, scores, strict=True))

    async def scored() -> list[float]:
        launchers = [
            LoraBaseTeacher(LoraBaseReplica.of(name, teacher, "by_request"), "token", base) for name in "ab"
        ]
        found = []
        async with AsyncExitStack() as stack:
            starts = await asyncio.gather(*(launcher.start("0") for launcher in launchers))
            a, b = [
                await stack.enter_async_context(ReplicaClient(one.url, one.token, teacher=name))
                for one, name in zip(starts, "ab", strict=True)
            ]
            for client, rows in ((a, group), (b, group), (a, longer), (b, group), (b, longer), (a, group)):
                replies = await client.score(rows)
                found.append(
                    largest_difference(rows, [(await reply.fetch()).sampled_logprobs for reply in replies])
                )
        for launcher in launchers:
            await launcher.stop("0")
        return found

    assert max(asyncio.run(scored())) < 1e-4


BESIDE_ENGINE = {"rollout__processes": 1, "student__lora__publish": "adapter"}


def in_engine_processes(processes: int) -> dict[str, Any]:
    return {"teachers__base__placement": "engine", **BESIDE_ENGINE, "rollout__processes": processes}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_base_teacher_in_an_engine_process_gives_the_same_bits_after_a_kill(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a run whose teacher is a process of its own. The engine process is killed after the first step."""
    started: list[EngineTeachers] = []
    start = EngineTeachers.start

    async def noted(self: EngineTeachers, replica: str) -> Endpoint:
        started.append(self)
        return await start(self, replica)

    def kill(step: understudy.Step) -> None:
        if step.step == 1:
            os.kill(started[0]._processes.children["rollout-0"].process.pid, signal.SIGKILL)

    apart = understudy.train(make_recipe("apart", "standalone", **BESIDE_ENGINE), progress=False).dir
    monkeypatch.setattr(EngineTeachers, "start", noted)
    run = understudy.train(make_recipe("killed", **in_engine_processes(1)), progress=False, on_step=kill).dir
    log = (run / "logs" / "trainer.log").read_text()
    assert "engine replica-0 is back" in log and "back after a restart" in log and len(started) == 2
    assert not list((run / "logs").glob("teacher-*")), "no process was started for it"
    assert bits(run) == bits(apart)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_run_with_the_base_in_engine_processes_resumes_to_the_same_bits(
    make_recipe: Make, tmp_path: Path
) -> None:
    table = make_recipe("killed", **in_engine_processes(2))
    path = write_toml(tmp_path / "r.toml", table)
    code, output = run_cli("train", str(path), "--quiet", fault="sync.after_update:2")
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    straight = understudy.train(make_recipe("straight", **in_engine_processes(2)), progress=False).dir
    assert bits(Path(table["run"]["dir"])) == bits(straight)


@pytest.mark.slow
def test_a_fully_async_run_trains_with_the_base_in_two_engine_processes(make_recipe: Make) -> None:
    more = {"trainer__mode": "fully_async", "trainer__max_staleness": 1.0, "trainer__steps": 6}
    run = understudy.train(make_recipe("run", **in_engine_processes(2), **more), progress=False)
    assert run.last["step"] == 6 and run.last["teacher/base/rows"] == 8


@pytest.mark.slow
def test_a_killed_run_with_the_base_beside_the_trainer_resumes_to_the_same_bits(
    make_recipe: Make, tmp_path: Path
) -> None:
    table = make_recipe("killed")
    path = write_toml(tmp_path / "r.toml", table)
    code, output = run_cli("train", str(path), "--quiet", fault="sync.after_update:2")
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    straight = understudy.train(make_recipe("straight"), progress=False).dir
    assert bits(Path(table["run"]["dir"])) == bits(straight)


@pytest.mark.slow
def test_a_fully_async_run_trains_with_the_base_beside_the_trainer(make_recipe: Make) -> None:
    more = {"trainer__mode": "fully_async", "trainer__max_staleness": 1.0, "trainer__steps": 6}
    run = understudy.train(make_recipe("run", **more), progress=False)
    assert run.last["step"] == 6 and run.last["teacher/base/rows"] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student__lora": None}, r"set \[student.lora\], or use 'standalone'"),
        ({"teachers__base__version": "live"}, "is for model = 'student' with version = 'start'"),
        ({"trainer__ranks": 2}, "the base is sharded over ranks"),
        (
            {"teachers__base__replicas": 2},
            "teachers.base.replicas belongs to replicas in processes of their own",
        ),
        ({"teachers__base__dtype": "bfloat16"}, "leave it out with teachers.base.placement = 'trainer'"),
        ({"teachers__base__model": str(STUDENT)}, "is for model = 'student'"),
        ({**in_engine_processes(1), "student__lora": None}, r"set \[student.lora\], or use 'standalone'"),
        ({"teachers__base__placement": "engine"}, "set rollout.processes, or use 'trainer'"),
        (
            {**in_engine_processes(1), "student__lora__publish": "merged"},
            "take the place of the base in the engine processes; set student.lora.publish = 'adapter'",
        ),
        (
            {**in_engine_processes(0), "rollout__engine": "vllm"},
            "or set rollout.engine = 'hf' and rollout.processes",
        ),
        ({**in_engine_processes(1), "teachers__base__version": "live"}, "with version = 'start'"),
        ({**in_engine_processes(1), "teachers__base__device": "cpu"}, "teachers.base.device belongs to replicas in processes"),
        ({**in_engine_processes(1), "teachers__base__attention": "eager"}, "leave it out with teachers.base.placement = 'engine'"),
        ({**in_engine_processes(1), "teachers__base__quantize": "int8"}, "and placement = 'engine' is set"),
        (
            {
                **in_engine_processes(1), "cluster__backend": "ray", "dataplane__backend": "transfer_queue",
                "rollout__workers": 1, "cluster__roles__workers": "p",
                "cluster__pools__p__cpus_per_node": 1, "cluster__pools__p__nodes": 1,
            },
            "cannot reach the engine's processes beside the trainer .give them a pool: cluster.roles.rollout",
        ),
    ],
)  # fmt: skip
def test_settings_that_cannot_share_the_base_are_refused(
    make_recipe: Make, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        understudy.train(make_recipe("never", **change), progress=False)


@pytest.mark.parametrize("task_coef", [0.0, 0.5])
def test_check_notes_a_base_teacher_whose_loss_begins_at_zero(
    make_recipe: Make, tmp_path: Path, task_coef: float
) -> None:
    """Without a prompt of its own the base gives the student's distribution, which teaches nothing. Beside
    rewards there is no note: there the base keeps the student near its start."""
    table = make_recipe("same", loss__task_coef=task_coef, rollout__n=2)
    del table["teachers"]["base"]["prompt"]
    table["data"]["reward"] = "understudy.rollout.rewards.builtin:exact_match"
    code, output = call_cli("check", str(write_toml(tmp_path / "recipe.toml", table)))
    assert code == 0, output
    assert ("the loss begins at 0 and nothing moves the student" in " ".join(output.split())) == (
        task_coef == 0
    )


def test_plan_lists_the_base_in_each_engine_process_and_counts_its_memory(make_recipe: Make) -> None:
    """The memory of an engine process includes the copies that it keeps of the adapted layers."""
    recipe = parse_recipe(make_recipe("run", **in_engine_processes(2)))
    planned = {one.name: one for one in plan_processes(recipe, seat(recipe, 0))}
    for i in range(2):
        job = f"scores, in the process of rollout-{i}, with its base"
        assert (planned[f"teacher-base-{i}"].job, planned[f"teacher-base-{i}"].bytes) == (job, 0)
    shapes = AutoModelForCausalLM.from_pretrained(STUDENT).named_parameters()
    kept = sum(4 * one.numel() for name, one in shapes if name.endswith("_proj.weight"))
    whole = sum(4 * one.numel() for one in AutoModelForCausalLM.from_pretrained(STUDENT).parameters())
    assert planned["rollout-1"].bytes == PROCESS_BYTES + whole + kept
    inside = {one.name: one for one in plan_processes(parse_recipe(make_recipe("inside")), seat(recipe, 0))}
    bases = planned["teacher-base-0"], planned["teacher-base-1"], inside["teacher-base-0"]
    assert [one.parameters for one in bases] == [whole // 4] * 3
