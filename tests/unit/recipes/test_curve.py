"""benchmarks/one_gpu/curve.py: the result rows of a run, compared with those of another run."""

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def lines(seconds: float, accuracies: list[float]) -> list[dict[str, float]]:
    steps = [
        {
            "step": step,
            "time/step": seconds,
            "response_length/mean": 50.0 * step,
            "rollout/rows": 4.0,
            "actor/entropy": 0.1 * step,
        }
        for step in range(1, 5)
    ]
    steps[1]["val/accuracy"], steps[3]["val/accuracy"] = accuracies
    return steps


def test_each_evaluation_has_its_accuracy_and_the_means_since_the_previous_one(tmp_path: Path) -> None:
    sys.path += [str(BENCHMARKS), str(BENCHMARKS / "one_gpu")]
    from curve import keep, rows_of

    sync = rows_of("a", lines(2.0, [0.25, 0.5]), [40.0, 60.0], skip=1)
    found = {row.name: row.value for row in sync}
    assert found["a, after 2 steps: accuracy"] == 0.25 and found["a, after 4 steps: accuracy"] == 0.5
    assert found["a, after 4 steps: actor/entropy, mean since the last evaluation"] == 0.35
    assert found["a: rate"] == 4 * (100 + 150 + 200) / 6.0 and found["a: 3 steps"] == 6.0
    assert found["a: GPU busy, start and evaluations included"] == 0.5

    path = tmp_path / "curves.json"
    keep(path, "a", sync, "")
    other = rows_of("a b", lines(1.0, [0.25, 0.75]), [], skip=1)
    keep(path, "a b", other[:2], "a")  # while the run is not finished
    keep(path, "a b", other, "a")
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    assert len(rows) == len(sync) + len(other)
    assert rows["a b, after 4 steps: accuracy"]["ratio"] == 1.5
    assert rows["a b: rate"]["peer_value"] == 300.0 and rows["a b: rate"]["ratio"] == 2.0
