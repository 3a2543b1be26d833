"""The runs that faults are injected into: small recipes of the quickstart's models, every process of them real."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_runs import ASSETS, TOKEN_VARIABLE

ROLES = {
    "replica": ("understudy.teacher.replica.server",),
    "engine": ("understudy.engines.hosted.process", "understudy.assembly.processes.scoring_engine"),
    "worker": ("understudy.rollout.workers.process",),
    "rank": ("understudy.assembly.processes.rank",),
    "critic": ("understudy.assembly.processes.critic",),
    "fork server": ("from understudy.cluster.fork_server_process import main",),
    "node": ("/raylet",),
    "queue": ("ray::SimpleStorageUnit",),
    "remote worker": ("understudy.trainers.remote_rows.worker",),
}
"""Role → the modules that its processes run, or the beginning of their program, or on Ray the end or beginning of their
title. The trainer is the process that was started."""

_ASYNC = {"trainer__mode": "fully_async"}
_ASYNC_1 = {**_ASYNC, "trainer__max_staleness": 1}
_GROUPS = {
    "rollout__n": 3, "rollout__filter_groups": True, "rollout__max_refills": 50, "loss__task_coef": 0.5,
    "data__reward": "small_rewards:coarse", "trainer__batch_size": 5,
}  # fmt: skip
_PPO = {
    "teachers": None, "loss": {"task_coef": 1.0, "distill_coef": 0.0, "advantage": "gae", "lam": 0.95},
    "critic__learning_rate": 1e-3, "critic__process": True, "rollout__n": 3, "data__reward": "small_rewards:varied",
    "trainer__batch_size": 4, "trainer__mini_batch_size": 2,
}  # fmt: skip
_RAY = {"cluster__backend": "ray", "dataplane__backend": "transfer_queue", "dataplane__storage_units": 1}
_RAY_WORKERS = {
    **_RAY, "rollout__workers": 2, "cluster__pools": {"loops": {"nodes": 1, "cpus_per_node": 2}},
    "cluster__roles": {"workers": "loops"},
}  # fmt: skip
_ON_RAY = ("trainer", "replica", "node", "queue", "remote worker")
_OUTPUTS = {
    "rollout__agent": "many_outputs:Outputs",
    "rollout__agent_options": {
        "many_outputs:Outputs": {"count": 2, "trouble": {"1/1": "long", "5/0": "raise", "9/1": "nan"}}
    },
    "data__shuffle": False, "data__reward": "many_outputs:reward", "trainer__batch_size": 8,
    "trainer__max_dead_letters": 0.5,
}  # fmt: skip
_OWN = {"model": "student", "prompt": "{{ answer }}{{ prompt }}"}
_SELF = {
    "teachers": {"add": {**_OWN, "key": "add", "version": "ema"}, "sort": {**_OWN, "key": "sort", "version": 1}},
    "trainer__ema_decay": 0.5,
}  # fmt: skip
"""The student in other versions is its teacher: a running average, and the weights of one publish before."""
_BASE = {
    "student__lora": {"rank": 4, "alpha": 8, "publish": "adapter"},
    "teachers__add": {**_OWN, "placement": "engine", "key": "add"}, "rollout__processes": 1,
}  # fmt: skip
_HOSTILE = {
    "rollout__agent": "hostile_tools:Hostile", "data__shuffle": False, "data__max_prompt_tokens": 40, "data__overlong": "drop",
    "trainer__batch_size": 8, "data__reward": "small_rewards:hostile", "trainer__max_dead_letters": 0.5,
}  # fmt: skip
_WASTEFUL = """{%- set asked = messages[0]['content'] -%}
{%- if asked.startswith('1') -%}{%- for i in range(99999) -%}{%- endfor -%}
{%- elif asked.startswith('2') -%}{{- 'x' * 100000 -}}{%- endif -%}
"""
"""A chat template that takes long, or writes a prompt that is too long. One that raises is refused before a run begins."""


@dataclass(frozen=True)
class Mode:
    changes: dict[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = ("trainer", "replica")
    to_the_bit: bool = True
    """A disturbed run ends with the weights, optimizer and metrics of an undisturbed one."""
    same_rows: bool = True
    """A disturbed run trains the rows of an undisturbed one."""
    staleness: float | None = None
    external: bool = False
    """One teacher is a server outside the run, behind a proxy."""
    proxied: bool = False
    """Connections between the run's own processes go through a proxy."""
    by_seed: bool = True
    """Whether seeds draw it. Otherwise it must be named: it needs the Ray extra, and takes minutes."""
    held_out: int = 0
    """Problems that the student is evaluated on."""
    pictures: bool = False
    """Small models with a vision tower, and rows with a picture each."""
    aligned: bool = False
    """One teacher has another tokenizer."""
    template: str = ""
    """The beginning of the student's chat template."""


def _async_1(changes: dict[str, Any], *others: str, external: bool = False) -> Mode:
    """Fully async with staleness 1, where rows and their order depend on time."""
    return Mode(
        {**_ASYNC_1, **changes}, ("trainer", "replica", *others), to_the_bit=False, same_rows=False, staleness=1, external=external
    )  # fmt: skip


MODES = {
    "sync full": Mode(),
    "sync fast": Mode({"run__determinism": "fast"}, to_the_bit=False),
    "async 0": Mode({**_ASYNC, "trainer__max_staleness": 0}, staleness=0),
    "async 1": _async_1({}),
    "async 2.5": Mode(
        {**_ASYNC, "trainer__max_staleness": 2.5}, to_the_bit=False, same_rows=False, staleness=2.5
    ),
    "lora": Mode({"student__lora": {"rank": 4, "alpha": 8}}),
    "epochs": Mode(
        {"trainer__epochs": 2, "trainer__mini_batch_size": 8}, ("trainer", "fork server", "replica")
    ),
    "filtered groups": Mode(_GROUPS),
    "several outputs": Mode(_OUTPUTS),
    "engine process": Mode({"rollout__processes": 1}, ("trainer", "replica", "engine")),
    "rollout workers": Mode({"rollout__workers": 2}, ("trainer", "replica", "worker")),
    "ranks": Mode({"trainer__ranks": 2}, ("trainer", "replica", "rank")),
    "critic": Mode(_PPO, ("trainer", "critic")),
    "evaluation": Mode({"trainer__eval_every": 1}, held_out=16),
    "external teacher": Mode(external=True),
    "ray queue": Mode(_RAY, ("trainer", "replica", "node", "queue"), by_seed=False),
    "ray workers": Mode(_RAY_WORKERS, _ON_RAY, by_seed=False),
    "ray several outputs": Mode({**_RAY_WORKERS, **_OUTPUTS}, _ON_RAY, by_seed=False),
    "proxy between processes": Mode({"teachers__sort__replicas": 2}, proxied=True),
    "async workers": _async_1({"rollout__workers": 2}, "worker"),
    "async engine process": _async_1({"rollout__processes": 1}, "engine"),
    "async ranks": _async_1({"trainer__ranks": 2}, "rank"),
    "async several outputs": _async_1(_OUTPUTS),
    "async filtered groups": _async_1(_GROUPS),
    "async external teacher": _async_1({}, external=True),
    "hostile tools": Mode(_HOSTILE, template=_WASTEFUL),
    "hostile tools in workers": Mode(
        {**_HOSTILE, "rollout__workers": 2}, ("trainer", "replica", "worker"), template=_WASTEFUL
    ),
    "pictures": Mode(pictures=True),
    "pictures with workers": Mode({"rollout__workers": 2}, ("trainer", "replica", "worker"), pictures=True),
    "self teachers": Mode(_SELF),
    "async self teachers": _async_1(_SELF),
    "base in the engine process": Mode(_BASE, ("trainer", "replica", "engine")),
    "other tokenizer": Mode(aligned=True),
}
STEPS = 6
CHECKPOINT_EVERY = 2
ROWS = 300
"""A launch checks every row of its data, so there are few."""


def recipe(mode: Mode, folder: Path, external_url: str | None = None) -> dict[str, Any]:
    table: dict[str, Any] = {
        "student": {"model": str(ASSETS / "models" / "student")},
        "teachers": {
            name: {"model": str(ASSETS / "models" / f"teacher-{name}"), "key": name, "replicas": 1}
            for name in ("add", "sort")
        },
        "loss": {"topk": 8},
        "rollout": {"max_new_tokens": 8, "max_batch": 8},
        "data": {
            "train": _rows(folder, "train", ROWS),
            "reward": "understudy.rollout.rewards.builtin:exact_match",
        },
        "trainer": {
            "steps": STEPS,
            "batch_size": 16,
            "learning_rate": 1e-3,
            "checkpoint_every": CHECKPOINT_EVERY,
        },
        "run": {"dir": str(folder / "run"), "threads": 1},
    }
    if mode.pictures:
        _with_pictures(table, folder)
    if mode.aligned:
        _with_another_tokenizer(table, folder)
    if mode.template:
        table["student"]["model"] = _with_template(mode.template, folder)
    if mode.held_out:
        table["data"]["eval"] = _rows(folder, "valid", mode.held_out)
    if external_url is not None:
        del table["teachers"]["add"]["replicas"]
        table["teachers"]["add"] |= {
            "placement": "external",
            "urls": [external_url],
            "token_env": TOKEN_VARIABLE,
        }
    for path, value in mode.changes.items():
        *sections, key = path.split("__")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return {section: entries for section, entries in table.items() if entries is not None}


def _rows(folder: Path, name: str, count: int) -> str:
    lines = (ASSETS / "data" / f"{name}.jsonl").read_text().splitlines(keepends=True)
    (folder / f"{name}.jsonl").write_text("".join(lines[:count]))
    return str(folder / f"{name}.jsonl")


def _with_template(beginning: str, folder: Path) -> str:
    own = folder / "student"
    shutil.copytree(ASSETS / "models" / "student", own, dirs_exist_ok=True)
    template = own / "chat_template.jinja"
    template.write_text(beginning + template.read_text())
    return str(own)


def _with_another_tokenizer(table: dict[str, Any], folder: Path) -> None:
    from other_teacher import write_other_teacher  # imports torch, which other modes need not

    other = {"model": write_other_teacher(folder / "other"), "vocabulary": "align", "key": "add"}
    table["teachers"]["add"] = other
    table["trainer"]["learning_rate"] = 1e-5  # its weights are random


def _with_pictures(table: dict[str, Any], folder: Path) -> None:
    """A student and a teacher with a vision tower, a teacher of text, and rows for both."""
    from vision_models import folder_of, picture, text_folder  # imports torch, which other modes need not

    colours = ("red", "green", "blue", "white")
    for i, colour in enumerate(colours):
        (folder / f"{i}.png").write_bytes(picture(colour, (32 + 8 * i, 24), (i, 3)))
    shown = [
        {"messages": [{"role": "user", "content": f"<image>{i}?"}], "images": [f"{i % 4}.png"], "answer": colours[i % 4], "data_source": "see"}
        for i in range(16)
    ]  # fmt: skip
    written = [
        {"messages": [{"role": "user", "content": f"{i}+1=?"}], "answer": str(i + 1), "data_source": "read"}
        for i in range(8)
    ]
    rows = folder / "pictures.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in (*shown, *written)))
    table["student"] = {"model": str(folder_of("qwen3_vl"))}
    table["teachers"] = {
        "see": {"model": str(folder_of("qwen3_vl", seed=3)), "key": "see"},
        "read": {"model": str(text_folder("qwen3_vl")), "key": "read"},
    }
    table["data"]["train"] = str(rows)
    table["trainer"]["batch_size"] = 8
