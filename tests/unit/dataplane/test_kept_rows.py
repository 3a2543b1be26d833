"""Kept rows: a uniform sample and the worst rows, within a byte budget, equal after kills and resumes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.dataplane import kept_rows
from understudy.dataplane.kept_rows import A_STEP, WORST_A_STEP, RowKeeper, choose, read_columns
from understudy.errors import DataPlaneError

KEYS = [f"00000-{n:07d}_0_0" for n in range(128)]


def columns(tokens: int = 20, k: int = 8) -> dict[str, Any]:
    draw = np.random.default_rng(tokens)
    chance = np.sort(draw.dirichlet(np.ones(k + 5), tokens), 1)[:, ::-1][:, :k]
    return {
        "tokens": np.arange(tokens, dtype=np.int32),
        "loss_mask": np.ones(tokens, bool),
        "teacher_ids": np.tile(np.arange(k, dtype=np.int32), (tokens, 1)),
        "teacher_topk_logprobs": np.log(chance).astype(np.float32),
        "teacher_hidden": np.zeros((tokens, 64), np.uint16),
        "reward": 1.0,
    }


def fill(keeper: RowKeeper, steps: range, size: int = 20) -> None:
    for step in steps:
        kls = [float((n * 7 + step) % 101) for n in range(len(KEYS))]
        chosen = choose(step, KEYS, kls)
        rows = [({"key": KEYS[i], "kl": kls[i], "why": why}, columns(size)) for i, why in chosen.items()]
        keeper.write(step, rows)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lines(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    return [
        (int(path.stem), one)
        for path in sorted(folder.glob("*.jsonl"))
        for one in map(json.loads, path.read_text().splitlines())
    ]


def test_a_step_keeps_a_random_sample_and_the_rows_with_the_highest_kl() -> None:
    kls: list[float | None] = [float(n) for n in range(128)]
    kls[127] = None
    kls[126] = float("nan")
    chosen = choose(3, KEYS, kls)
    assert {i for i, why in chosen.items() if why != "sample"} == set(range(125, 125 - WORST_A_STEP, -1))
    assert sum(why != "worst" for why in chosen.values()) == A_STEP
    assert choose(3, KEYS, kls) == chosen != choose(4, KEYS, kls)


def test_the_sample_of_kept_rows_is_uniform() -> None:
    counted = np.zeros(len(KEYS))
    for step in range(2000):
        for i in sorted(range(len(KEYS)), key=lambda i: kept_rows.place_of(step, KEYS[i]))[:A_STEP]:
            counted[i] += 1
    expected = 2000 * A_STEP / len(KEYS)
    assert abs(counted - expected).max() < 6 * np.sqrt(expected)


def test_kept_columns_have_the_tail_mass_and_no_hidden_states(tmp_path: Path) -> None:
    keeper = RowKeeper(tmp_path / "kept", 1 << 20)
    keeper.write(1, [({"key": "a", "kl": 1.0, "why": "sample"}, columns(9, k=40))])
    ((step, line),) = lines(tmp_path / "kept")
    found, given = read_columns(tmp_path / "kept", step, line), columns(9, k=40)
    assert found["tokens"].tolist() == list(range(9)) and "teacher_hidden" not in found
    assert found["teacher_ids"].shape == (9, kept_rows.MOST_CANDIDATES)
    assert found["tail"] == pytest.approx(1 - np.exp(given["teacher_topk_logprobs"]).sum(1), abs=1e-6)


def test_kept_rows_stay_within_the_budget_and_include_sampled_and_worst_rows(tmp_path: Path) -> None:
    folder, budget = tmp_path / "kept", 200_000
    keeper = RowKeeper(folder, budget)
    for first in range(1, 61, 10):
        fill(keeper, range(first, first + 10))
        assert sum(path.stat().st_size for path in folder.iterdir()) < budget
    found = lines(folder)
    assert {one["why"] for _, one in found} >= {"sample", "worst"}
    assert min(one["kl"] for _, one in found if one["why"] == "worst") > 95
    assert {step for step, _ in found} & set(range(1, 11)) and {step for step, _ in found} & set(
        range(51, 61)
    )
    for step, line in found:
        assert len(read_columns(folder, step, line)["tokens"]) == 20


def test_a_resumed_run_keeps_the_same_rows_as_an_uninterrupted_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    keeper = RowKeeper(one, 1 << 20)
    fill(keeper, range(1, 31))
    fill(RowKeeper(two, 1 << 20), range(1, 26))  # killed at step 25; its last checkpoint is of step 20
    fill(RowKeeper(two, 1 << 20, last_step=20), range(21, 31))
    assert files(one) == files(two)


def test_a_row_larger_than_a_steps_share_of_the_budget_is_not_kept(tmp_path: Path) -> None:
    keeper = RowKeeper(tmp_path / "kept", 4096)
    fill(keeper, range(1, 3), size=5000)
    assert lines(tmp_path / "kept") == []


def test_reading_a_kept_row_that_was_modified_raises(tmp_path: Path) -> None:
    fill(RowKeeper(tmp_path, 1 << 20), range(1, 2))
    (_, line), *_ = lines(tmp_path)
    data = bytearray((tmp_path / "000001.rows").read_bytes())
    data[5] ^= 1
    (tmp_path / "000001.rows").write_bytes(data)
    with pytest.raises(DataPlaneError, match="rewritten or damaged"):
        read_columns(tmp_path, 1, line)


def test_a_step_within_the_budget_does_not_visit_the_kept_rows_of_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run keeps ten thousand rows; visiting all of them at every step took 15 ms."""
    keeper = RowKeeper(tmp_path / "kept", 1 << 20)
    fill(keeper, range(1, 6))
    visited_steps: list[int] = []
    counted = kept_rows._Kept.bytes.fget
    monkeypatch.setattr(
        kept_rows._Kept, "bytes", property(lambda one: visited_steps.append(one.step) or counted(one))
    )
    fill(keeper, range(6, 7))
    assert set(visited_steps) == {6}
    fill(keeper, range(5, 6))
    assert set(visited_steps) == {5, 6}


def test_the_running_byte_count_equals_that_of_the_files(tmp_path: Path) -> None:
    keeper = RowKeeper(tmp_path / "kept", 200_000)
    fill(keeper, range(1, 61))
    fill(keeper, range(50, 55))
    again = RowKeeper(tmp_path / "kept", 200_000)
    assert keeper._bytes == again._bytes and sum(keeper._bytes.values()) > 50_000


@pytest.mark.parametrize("written", ["rows", "new"])
def test_the_budget_holds_after_a_kill_while_the_files_of_a_step_were_replaced(
    tmp_path: Path, written: str
) -> None:
    """The two files of a step are replaced one after the other, and the kill comes between."""
    folder, budget = tmp_path / "kept", 200_000
    fill(RowKeeper(folder, budget), range(1, 31))
    body = (folder / "000030.rows").read_bytes()
    (folder / f"000030.{written}").write_bytes(body[len(body) // 2 :])
    keeper = RowKeeper(folder, budget, last_step=30)
    assert not list(folder.glob("*.new"))
    fill(keeper, range(31, 91))
    assert sum(path.stat().st_size for path in folder.iterdir()) < budget
