"""Sources of hydra's users: YAML with interpolations and anchors, overrides in every notation, scripts, defaults lists."""

from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError
from understudy.porting.hydra_values import read_value, read_yaml
from understudy.porting.sources import Source, read_source


def of_file(tmp_path: Path, text: str, *more: str, name: str = "a.yaml") -> Source:
    (tmp_path / name).write_text(text)
    return read_source([str(tmp_path / name), *more])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("[a,b]", ["a", "b"]),
        ("['console','wandb']", ["console", "wandb"]),
        ('"quoted"', "quoted"),
        ("null", None),
        ("", ""),
        ("True", True),
        ("1_000", 1000),
        ("2026-01-02", "2026-01-02"),
        ("10:20", "10:20"),
        ("007", "007"),
        ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}),
        ("{a: 1}", {"a": 1}),
        ("-1", -1),
        ("'2'", 2),
        ("2.", 2.0),
    ],
)
def test_read_value_parses_the_value_of_an_override(text: str, value: Any) -> None:
    assert read_value(text) == value


def test_every_notation_of_a_hydra_override_is_read() -> None:
    words = ["a.b=1", "+c.d=x", "++e.f=null", "g={h:{i:2}}", "model_engine=megatron", "actor@x.actor=other"]
    source = read_source(["python3", "-m", "verl.trainer.main_ppo", *words, "5=6"])
    assert source.keys == {"a.b": 1, "c.d": "x", "e.f": None, "g.h.i": 2, "model_engine": "megatron"}
    assert source.not_read == ["actor@x.actor=other"]
    assert any("5=6" in note for note in source.notes)


def test_a_key_that_an_override_removes_counts_as_not_given(tmp_path: Path) -> None:
    source = of_file(tmp_path, "a: {b: 1, c: {d: 2}}\ne: 3\n", "~a.c", "~e=3")
    assert source.keys == {"a.b": 1} and sum("as not given" in note for note in source.notes) == 2


def test_words_before_the_program_are_not_read_as_overrides() -> None:
    source = read_source(["env A.B=1 HF_HOME=/x ray job submit -- python3 -m main_x a.b=2"])
    assert source.keys == {"a.b": 2} and source.program == "main_x"


def test_yaml_anchors_and_merge_keys_are_resolved(tmp_path: Path) -> None:
    text = "x: &base {lr: 1e-6, n: 4}\ny:\n  <<: *base\n  n: 8\n"
    assert of_file(tmp_path, text).keys == {"x.lr": 1e-6, "x.n": 4, "y.lr": 1e-6, "y.n": 8}


def test_interpolations_are_resolved_after_the_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_HERE", "/rows")
    monkeypatch.delenv("DATA_THERE", raising=False)
    text = (
        "a: {n: 3, name: run, twin: '${.n}', up: '${..b.m}'}\n"
        "b: {m: '${a.n}', file: '${oc.env:DATA_HERE}/${a.name}.parquet', other: '${oc.env:DATA_THERE,7}'}\n"
        "c: ['${a.name}', '${oc.select:z.z,5}', '${1}']\n"
        "d: {lost: 'x-${z.z}', too: '${oc.env:DATA_THERE}', none: '${oc.select:z.z}'}\n"
    )
    source = of_file(tmp_path, text, "a.n=9", "e.f=${a.name}")
    wanted = {"a.twin": 9, "a.up": 9, "b.m": 9, "b.file": "/rows/run.parquet", "b.other": 7, "d.none": None}
    assert {key: source.keys[key] for key in wanted} == wanted and source.keys["e.f"] == "run"
    assert source.keys["c"] == ["run", 5, "${1}"] and "d.lost" not in source.keys
    (note,) = source.notes
    assert "2 values" in note and "d.lost = x-${z.z}" in note


def test_interpolations_of_sections_and_nested_interpolations_are_resolved(tmp_path: Path) -> None:
    text = (
        "a: {optim: {lr: 1e-6, steps: '${a.n}'}, n: 4}\n"
        "b: {optim: '${a.optim}', k: '${oc.select:z.z,${oc.select:a.n,7}}', j: '${oc.select:z.z,${oc.select:y.y,7}}'}\n"
    )
    source = of_file(tmp_path, text)
    wanted = {"b.optim.lr": 1e-6, "b.optim.steps": 4, "b.k": 4, "b.j": 7}
    assert {key: source.keys.get(key) for key in wanted} == wanted and not source.notes


def test_circular_interpolations_terminate(tmp_path: Path) -> None:
    assert "a.b" in of_file(tmp_path, "a: {b: '${a.c}', c: '${a.b}'}\n").keys


@pytest.mark.parametrize(
    ("text", "match"),
    [("", "is empty"), ("# nothing\n", "is empty"), ("a: [", "is not YAML"), ("[1, 2]", "table of keys"), ("5", "table of keys")],
)  # fmt: skip
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        of_file(tmp_path, text)
    with pytest.raises(ConfigError, match=match):
        read_yaml(text, "a.yaml")


def test_the_overrides_file_that_hydra_writes_is_read(tmp_path: Path) -> None:
    assert of_file(tmp_path, "- a.b=1\n- +c.d=[x,y]\n").keys == {"a.b": 1, "c.d": ["x", "y"]}


@pytest.mark.parametrize("name", ["a.toml", "a.txt", "a.sh", "a.bin"])
def test_files_that_are_not_yaml_and_folders_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe" if name == "a.bin" else b"[student]\nmodel = 'x'\n")
    with pytest.raises(ConfigError, match="cannot be read" if name == "a.bin" else "YAML file"):
        read_source([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="is a folder"):
        read_source([str(tmp_path)])


def test_the_files_named_by_config_name_and_its_defaults_are_merged(tmp_path: Path) -> None:
    """The file of `--config-name`, and the files of its own `defaults`, are searched beside the script."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - base\n  - actor@x.actor: other\n  - _self_\na: {n: 2, m: 2}\n"
    )
    (tmp_path / "conf" / "base.yaml").write_text("a: {n: 1, k: '${a.m}'}\n")
    for flags in (
        "--config-path conf --config-name mine",
        '--config-path="$HERE/conf" --config-name=mine.yaml',
    ):
        text = f'HERE=$(cd "$(dirname "$0")" && pwd)\npython3 -m x.main {flags} a.m=3\n'
        source = of_file(tmp_path, text, name="run.sh")
        assert source.keys == {"a.n": 2, "a.m": 3, "a.k": 3} and source.config == "mine"
        assert source.not_read == ["ppo_trainer", "actor@x.actor: other"]


def test_the_training_command_is_found_among_other_commands(tmp_path: Path) -> None:
    text = (
        "python3 prepare.py --out data\n"
        "python3 -m verl.trainer.main_ppo a.b=1 a.c=$X \\\n"
        "   trainer.name=verl \\\n\n"
        "   d.e=5\n"
        "python3 -m verl.model_merger merge --local_dir out/verl\n"
    )
    source = of_file(tmp_path, text, "a.b=4", name="run.sh")
    assert source.program == "verl.trainer.main_ppo"
    assert source.keys == {"a.b": 4, "a.c": "$X", "trainer.name": "verl"}
    assert any("d.e=5 begins a command of its own" in note for note in source.notes)


def test_notes_name_sourced_files_and_variables_that_depend_on_conditions(tmp_path: Path) -> None:
    text = ". ./env.sh\nif [ -d /data ]; then N=8; fi\npython3 -m verl.x a.b=$N\n"
    notes = of_file(tmp_path, text, name="run.sh").notes
    assert any("./env.sh" in note for note in notes) and any("$N" in note for note in notes)
