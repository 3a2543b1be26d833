"""Runs the schedules of many seeds and collects what came of them.

    python tests/nemesis/campaign.py --seeds 0:100 --out nemesis.jsonl      as `make nemesis SEEDS=0:100`
    python tests/nemesis/campaign.py --schedule '{"mode": "sync full", "faults": [...]}'

A seed that the file has already is left out, so a campaign can be made in pieces. A schedule that fails is
made smaller and printed as a command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), *(str(HERE.parent / name) for name in ("e2e", "contract/teacher", "unit/images"))]

from checker import History, violations  # noqa: E402
from driver import Trial, promise, reference  # noqa: E402
from modes import MODES  # noqa: E402
from schedules import Schedule, draw, shrink  # noqa: E402


def try_schedule(schedule: Schedule, folder: Path) -> dict[str, Any]:
    """What came of one schedule: faults that hit, launches, violations."""
    mode = MODES[schedule.mode]
    compared = mode.to_the_bit or mode.same_rows
    place = folder / "references" / schedule.mode.replace(" ", "-")
    expected = reference(schedule.mode, place) if compared else History()
    started = time.monotonic()
    trial = Trial(schedule, folder / "trial")
    found = trial.carry_out()
    return {
        "mode": schedule.mode,
        "faults": len(trial.injected),
        "kinds": sorted(f"{fault.kind} {fault.role}" for fault in trial.injected),
        "launches": [launch.code for launch in found.launches],
        "seconds": round(time.monotonic() - started, 1),
        "violations": violations(found, expected, promise(schedule.mode)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default="0:13", help="FIRST:END")
    parser.add_argument("--mode", help="one mode for all seeds")
    parser.add_argument(
        "--only", default="", help="kinds of faults, with or without the role: 'clock,kill replica'"
    )
    parser.add_argument("--most", type=int, default=6, help="faults of a schedule")
    parser.add_argument(
        "--out", type=Path, default=Path("nemesis.jsonl"), help="one line per seed is appended"
    )
    parser.add_argument("--schedule", help="run this schedule alone")
    parser.add_argument(
        "--shrink", type=int, default=12, help="trials that a failing schedule is made smaller with"
    )
    parser.add_argument("--first", action="store_true", help="end at the first violation")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after this long")
    parser.add_argument("--folder", type=Path, help="keeps the undisturbed runs for the next call")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="understudy-nemesis-") as name:
        folder = options.folder or Path(name)
        if options.schedule:
            found = try_schedule(Schedule.from_dict(json.loads(options.schedule)), folder)
            print(json.dumps(found, indent=1))
            return int(bool(found["violations"]))
        return _many(options, folder)


def _many(options: argparse.Namespace, folder: Path) -> int:
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {(line["seed"], line.get("only")) for line in map(json.loads, lines)}
    first, _, end = options.seeds.partition(":")
    deadline, failed, tried, faults = time.monotonic() + options.seconds, 0, 0, 0
    for seed in range(int(first), int(end)):
        if (seed, options.mode) in done:
            continue
        if time.monotonic() > deadline:
            break
        schedule = draw(seed, options.mode, options.most, list(filter(None, options.only.split(","))))
        found = try_schedule(schedule, folder)
        tried, faults, failed = tried + 1, faults + found["faults"], failed + bool(found["violations"])
        print(f"seed {seed} ({schedule.mode}): {found['faults']} faults, launches {found['launches']}, {found['seconds']} s", flush=True)  # fmt: skip
        if found["violations"]:
            print(*(f"  violation: {one}" for one in found["violations"]), sep="\n", flush=True)
            small = shrink(
                schedule, lambda one: bool(try_schedule(one, folder)["violations"]), options.shrink
            )
            found["smallest"] = small.as_dict()
            print(
                f"  repeat: python tests/nemesis/campaign.py --schedule '{json.dumps(small.as_dict())}'",
                flush=True,
            )
        with options.out.open("a") as file:
            file.write(json.dumps({"seed": seed, "only": options.mode, **found}) + "\n")
        if failed and options.first:
            break
    print(f"{tried} schedules, {faults} faults, {failed} schedules with violations")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
