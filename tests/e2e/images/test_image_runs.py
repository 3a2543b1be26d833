"""Whole runs with pictures: trained, resumed to the bit, evaluated, exported; on both schedules and with workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import call_cli, run_cli, write_toml
from transformers import AutoImageProcessor, AutoModelForImageTextToText, Idefics3Processor
from vision_models import TILE_TOKENS, folder_of, picture, text_folder

from understudy.dataplane.ledger import audit
from understudy.observability.metrics import read_metrics, without_clock

COLOURS = ("red", "green", "blue", "white", "black", "yellow")
STEPS = 3


def rows_in(folder: Path, text_rows: int = 0, count: int = 12) -> Path:
    """Writes rows with one picture each and rows without, routed by data_source."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(count):
        colour = COLOURS[i % len(COLOURS)]
        (folder / f"{i}.png").write_bytes(picture(colour, (32 + 8 * (i % 3), 24), (i % 5, 3)))
        rows.append(
            {
                "messages": [{"role": "user", "content": "<image>colour?"}],
                "images": [f"{i}.png"],
                "answer": colour,
                "data_source": "see",
            }
        )
    rows += [
        {"messages": [{"role": "user", "content": f"{i}+1=?"}], "answer": str(i + 1), "data_source": "read"}
        for i in range(text_rows)
    ]
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table_of(tmp_path: Path, family: str = "qwen3_vl", text_rows: int = 4, **changes: Any) -> dict[str, Any]:
    data = rows_in(tmp_path / "data", text_rows)
    table: dict[str, Any] = {
        "student": {"model": str(folder_of(family))},
        "teachers": {"see": {"model": str(folder_of(family, seed=3)), "key": "see"}},
        "loss": {"topk": 4},
        "rollout": {"max_new_tokens": 6, "max_batch": 8, "n": 2},
        "data": {"train": str(data), "reward": "understudy.rollout.rewards.builtin:exact_match"},
        "trainer": {"steps": STEPS, "batch_size": 8, "learning_rate": 1e-3, "checkpoint_every": 1},
        "run": {"dir": str(tmp_path / "run"), "threads": 1},
    }
    if text_rows:
        table["teachers"]["read"] = {"model": str(text_folder(family)), "key": "read"}
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return table


def train(tmp_path: Path, table: dict[str, Any]) -> Path:
    code, output = call_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    assert code == 0, output
    run = Path(table["run"]["dir"])
    report = audit(run)
    assert report.balanced and report.dead == 0 and report.in_flight == 0, str(report)
    return run


def weights_of(run: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def changed_weights(run: Path, table: dict[str, Any]) -> set[str]:
    """Names of the student's weights that differ from those it began with."""
    start = AutoModelForImageTextToText.from_pretrained(table["student"]["model"]).state_dict()
    return {name for name, found in weights_of(run).items() if not np.array_equal(found, start[name].numpy())}


def test_a_run_with_a_vision_and_a_text_teacher_trains_the_language_part_and_exports(tmp_path: Path) -> None:
    """The run directory stores each picture once, and the exported folder has the image processor."""
    table = table_of(tmp_path, run__rollout_dump_every=1, data__eval=str(tmp_path / "data" / "train.jsonl"))
    run = train(tmp_path, table)
    moved = changed_weights(run, table)
    assert any("language_model" in name for name in moved) and not any("visual" in name for name in moved)
    stored = {path.name for path in (run / "media").rglob("*") if path.is_file()} - {"sources.jsonl"}
    assert 0 < len(stored) <= 12
    for place in ("kept_rows", "rollouts", "samples.jsonl"):
        files = [run / place] if place.endswith("jsonl") else (run / place).glob("*.jsonl")
        rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        shown = [set(row.get("media", ())) for row in rows]
        assert any(shown) and set.union(*shown) <= stored, f"rows in {place} name their pictures"
    out = tmp_path / "exported"
    code, output = call_cli("export", str(run), str(out))
    assert code == 0, output
    assert AutoImageProcessor.from_pretrained(out, backend="pil").patch_size == 8
    again = AutoModelForImageTextToText.from_pretrained(out).state_dict()
    assert all(np.array_equal(again[name].numpy(), found) for name, found in weights_of(run).items())


@pytest.mark.slow
def test_a_killed_and_resumed_run_with_pictures_gives_the_same_bits(tmp_path: Path) -> None:
    reference = train(tmp_path, table_of(tmp_path))
    table = table_of(tmp_path, run__dir=str(tmp_path / "killed"))
    recipe = write_toml(tmp_path / "killed.toml", table)
    code, output = run_cli("train", str(recipe), "--quiet", fault="sync.after_produce:2")
    assert code != 0, output
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    killed = Path(table["run"]["dir"])
    assert same_bits(weights_of(killed), weights_of(reference))
    metrics = [
        [without_clock(line) for line in read_metrics(run / "metrics.jsonl")] for run in (killed, reference)
    ]
    assert metrics[0] == metrics[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "idefics3"])
def test_each_vision_family_trains_its_vision_tower_and_exports(family: str, tmp_path: Path) -> None:
    table = table_of(tmp_path, family, student__freeze_vision=False)
    run = train(tmp_path, table)
    moved = changed_weights(run, table)
    assert any("vis" in name for name in moved), "freeze_vision = false trains the vision tower"
    assert any("vis" not in name for name in moved), "and the language part"
    code, output = call_cli("export", str(run), str(tmp_path / "exported"))
    assert code == 0, output
    if family == "idefics3":
        own = Idefics3Processor.from_pretrained(tmp_path / "exported", backend="pil")
        assert own.image_seq_len == TILE_TOKENS, "transformers' own processor expands pictures as it did"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__mode": "fully_async", "run__determinism": "fast"},
        {"rollout__workers": 2},
        {"rollout__processes": 1},
        {"loss__task_coef": 1.0, "loss__kl_coef": 0.1},
        {"trainer__epochs": 2, "trainer__mini_batch_size": 4},
        {"student__lora__rank": 4},
        {"trainer__ranks": 2},
        {"teachers__see__replicas": 2},
        {"loss__signal": "hidden", "teachers__read__model": None},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_runs_with_pictures_train_with_each_schedule_process_layout_and_loss(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    text_rows = 0 if "teachers__read__model" in changes else 4
    changes = {name: value for name, value in changes.items() if value is not None}
    run = train(tmp_path, table_of(tmp_path, text_rows=text_rows, **changes))
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] > 0]
    assert len(lines) == STEPS and audit(run).trained > 0
    assert all(np.isfinite(line["actor/loss"]) and line["actor/grad_norm"] > 0 for line in lines)
    assert any((run / "media").rglob("*"))


def test_a_row_whose_picture_is_torn_or_missing_becomes_a_dead_letter(tmp_path: Path) -> None:
    table = table_of(tmp_path, text_rows=0, data__shuffle=False, trainer__max_dead_letters=0.9)
    (tmp_path / "data" / "1.png").write_bytes(b"torn")
    (tmp_path / "data" / "2.png").unlink()
    code, output = call_cli("check", str(write_toml(tmp_path / "recipe.toml", table)))
    assert code == 0 and "2 of 12 rows with pictures become dead letters" in output, output
    code, output = call_cli("train", str(tmp_path / "recipe.toml"), "--quiet")
    report = audit(Path(table["run"]["dir"]))
    assert code == 0 and report.balanced and report.dead == 8, f"{report} {output}"
    letters = " ".join(path.read_text() for path in Path(table["run"]["dir"]).rglob("*.jsonl"))
    assert "1.png is not a readable picture" in letters and "2.png does not exist" in letters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student__model": "text"}, "reads text only. Supported are Qwen2.5-VL"),
        ({"rollout__engine": "openai", "rollout__urls": ["http://127.0.0.1:1"], "rollout__live_weights": False}, "gets text only"),
        ({"teachers__see__backend": "sglang", "teachers__see__placement": "external", "teachers__see__urls": ["http://127.0.0.1:1"]}, "a teacher served by sglang gets text only"),
        ({"teachers__see__backend": "vllm", "cluster__backend": "ray"}, "a teacher served by vllm gets no pictures from remote workers"),
        ({"teachers__see__placement": "external", "teachers__see__urls": ["http://127.0.0.1:1"], "cluster__backend": "ray", "cluster__pools": {"loops": {"nodes": 1, "cpus_per_node": 1}}, "cluster__roles": {"workers": "loops"}, "dataplane__backend": "transfer_queue", "rollout__workers": 1}, "set backend = 'native'"),
        ({"teachers__see__model": "text"}, "goes to teachers.see, of the family qwen3"),
        ({"teachers__see__prompt": "{{ answer }}"}, "a prompt of its own holds no pictures"),
        ({"teachers__see__quantize": "int8"}, "teachers.see.quantize = 'int8' is for text models"),
        ({"teachers__see__offload": 1}, "teachers.see.offload = 1 is for text models"),
        ({"teachers__see__tensor_parallel": 2}, "teachers.see.tensor_parallel = 2 is for text models"),
        ({"trainer__ranks": 2, "student__freeze_vision": False}, "set trainer.ranks = 1"),
        ({"loss__task_coef": 1.0, "loss__advantage": "gae", "critic__learning_rate": 1e-4}, "a critic reads text only; leave [critic] out"),
    ],
)  # fmt: skip
def test_check_refuses_settings_that_do_not_support_pictures(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    text = str(text_folder("qwen3_vl"))
    changes = {name: text if value == "text" else value for name, value in changes.items()}
    code, output = call_cli("check", str(write_toml(tmp_path / "recipe.toml", table_of(tmp_path, **changes))))
    assert code != 0 and message in " ".join(output.split()), output
