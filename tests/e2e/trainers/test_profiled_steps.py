"""`run.profile_steps` writes a trace of the trainer's process and does not change the metrics."""

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

import understudy
from understudy.cli.main import main
from understudy.observability.metrics import without_clock

Make = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_profiled_step_traces_the_operators_of_all_threads(recipe: Make, mode: str) -> None:
    more = {"trainer__mode": mode, "trainer__steps": 3, "run__determinism": "full"}
    if mode == "fully_async":
        more |= {"trainer__max_staleness": 0}
    run = understudy.train(recipe("profiled", run__profile_steps=[2], **more), progress=False)
    assert [path.name for path in (run.dir / "profile").iterdir()] == ["000002.json.gz"]
    events = json.loads(gzip.decompress((run.dir / "profile" / "000002.json.gz").read_bytes()))["traceEvents"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    names = {event["name"] for event in operators}
    assert any("Backward" in name for name in names) and "aten::embedding" in names, "backward and forward"
    assert len({event["tid"] for event in operators}) > 1, "the update and the engine have their own threads"
    plain = understudy.train(recipe("plain", **more), progress=False)
    assert [without_clock(line) for line in run.metrics] == [without_clock(line) for line in plain.metrics]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("three", "'three': expected steps such as 3, 3-5 or 3,8"),
        ("1,5-3", "'1,5-3': 5 comes after 3; expected steps such as 3-5"),
    ],
)
def test_malformed_profile_steps_are_refused(
    capsys: pytest.CaptureFixture[str], word: str, told: str
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "recipe.toml", "--profile", word])
    assert told in capsys.readouterr().err
