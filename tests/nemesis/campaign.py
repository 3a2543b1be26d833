"""Runs the fault schedules of many seeds and appends their results to a file.

    python tests/nemesis/campaign.py --seeds 0:100 --out nemesis.jsonl      as `make nemesis SEEDS=0:100`
    python tests/nemesis/campaign.py --schedule '{"mode": "sync full", "faults": [...]}'
    python tests/nemesis/campaign.py --summary first.jsonl second.jsonl

A seed that the file already has is skipped, so a campaign can be run in pieces. Several can run side by side, each with
its own `--seeds`, and with one shared folder of `--references`. A schedule that fails is shrunk and printed as a
command that repeats it. One that cannot be carried out is an `error` line, and the next call tries it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path += [
    str(HERE),
    *(str(HERE.parent / name) for name in ("e2e", "contract/teacher", "unit/images", "unit/rollout")),
]

from checker import History, violations  # noqa: E402
from driver import Trial, processes_of, promise, reference  # noqa: E402
from modes import MODES  # noqa: E402
from schedules import MOST, Schedule, draw, shrink  # noqa: E402
from starting import trainer_server  # noqa: E402
from summary import identity, read_results, summary  # noqa: E402


def try_schedule(
    schedule: Schedule, folder: Path, references: Path | None = None, fork: bool = False
) -> dict[str, Any]:
    """Carries out one schedule; returns the faults that hit, the launches and the violations."""
    mode = MODES[schedule.mode]
    server = trainer_server() if fork else None
    compared = mode.to_the_bit or mode.same_rows
    place = (references or folder / "alone") / schedule.mode.replace(" ", "-")
    expected = reference(schedule.mode, place, server) if compared else History()
    started = time.monotonic()
    trial = Trial(schedule, folder / "trial", server)
    try:
        found = trial.carry_out()
    except BaseException:
        for process in processes_of(trial.folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        raise
    return {
        "mode": schedule.mode,
        "drawn": len(schedule.faults),
        "faults": len(trial.injected),
        "kinds": sorted(f"{fault.kind} {fault.role}" for fault in trial.injected),
        "launches": [launch.code for launch in found.launches],
        "seconds": round(time.monotonic() - started, 1),
        "violations": [
            without_paths(one, trial.folder) for one in violations(found, expected, promise(schedule.mode))
        ],
    }


def without_paths(text: str, folder: Path) -> str:
    """Removes paths of this machine: a violation quotes a launch's log, and result files are kept."""
    return text.replace(str(folder), "FOLDER").replace(f"{HERE.parents[1]}/", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default="0:13", help="FIRST:END")
    parser.add_argument("--mode", help="one mode for all seeds")
    parser.add_argument(
        "--only", default="", help="kinds of faults, with or without the role: 'clock,kill replica'"
    )
    parser.add_argument("--most", type=int, default=MOST, help="faults of a schedule; half of them at least")
    parser.add_argument(
        "--out", type=Path, default=Path("nemesis.jsonl"), help="one line per seed is appended"
    )
    parser.add_argument("--schedule", help="run this schedule alone")
    parser.add_argument(
        "--shrink", type=int, default=12, help="trials that a failing schedule is made smaller with"
    )
    parser.add_argument("--first", action="store_true", help="end at the first violation")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after this long")
    parser.add_argument("--folder", type=Path, help="where schedules run; no other campaign may use it")
    parser.add_argument(
        "--references", type=Path, help="keeps the undisturbed runs; campaigns of one machine may share it"
    )
    parser.add_argument(
        "--no-fork",
        action="store_true",
        help="start each trainer and its fork server as a fresh Python",
    )
    parser.add_argument(
        "--summary", type=Path, nargs="+", metavar="FILE", help="print what these result files say together"
    )
    options = parser.parse_args()
    if options.summary:
        print(summary(line for path in options.summary for line in read_results(path)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes of the schedule too
    with tempfile.TemporaryDirectory(
        prefix="nem-"
    ) as name:  # short, as paths of Ray's sockets have 107 bytes
        options.folder = (options.folder or Path(name)).resolve()
        options.references = (options.references or options.folder / "alone").resolve()
        if options.schedule:
            found = _try(Schedule.from_dict(json.loads(options.schedule)), options)
            print(json.dumps(found, indent=1))
            return int(bool(found["violations"]))
        return _many(options)


def _try(schedule: Schedule, options: argparse.Namespace) -> dict[str, Any]:
    return try_schedule(schedule, options.folder, options.references, not options.no_fork)


def _many(options: argparse.Namespace) -> int:
    done = {identity(line) for line in read_results(options.out) if "error" not in line}
    first, _, end = options.seeds.partition(":")
    deadline, failed, tried, faults, errors = time.monotonic() + options.seconds, 0, 0, 0, 0
    for seed in range(int(first), int(end)):
        asked = {"seed": seed, "asked_mode": options.mode, "only": options.only}
        if identity(asked) in done:
            continue
        if time.monotonic() > deadline:
            break
        schedule = draw(seed, options.mode, options.most, list(filter(None, options.only.split(","))))
        try:
            found = _try_and_shrink(seed, schedule, options)
        except Exception:  # an error of the driver must not end the campaign
            errors += 1
            found = {"mode": schedule.mode, "error": traceback.format_exc()[-2000:], "schedule": schedule.as_dict()}  # fmt: skip
            print(f"seed {seed} ({schedule.mode}) could not be carried out: {found['error']}", flush=True)
        else:
            tried, faults, failed = tried + 1, faults + found["faults"], failed + bool(found["violations"])
        _append(options.out, {**asked, **found})
        if failed and options.first:
            break
    print(f"{tried} schedules, {faults} faults, {failed} schedules with violations, {errors} errors")
    return int(failed + errors > 0)


def _try_and_shrink(seed: int, schedule: Schedule, options: argparse.Namespace) -> dict[str, Any]:
    found = _try(schedule, options)
    print(f"seed {seed} ({schedule.mode}): {found['faults']} of {found['drawn']} faults, launches {found['launches']}, {found['seconds']} s", flush=True)  # fmt: skip
    if found["violations"]:
        print(*(f"  violation: {one}" for one in found["violations"]), sep="\n", flush=True)
        found["schedule"] = schedule.as_dict()
        small = shrink(schedule, lambda one: bool(_try(one, options)["violations"]), options.shrink)
        found["smallest"] = small.as_dict()
        again = json.dumps(small.as_dict())
        print(f"  repeat: python tests/nemesis/campaign.py --schedule '{again}'", flush=True)
    return found


def _append(out: Path, line: dict[str, Any]) -> None:
    """In one write, so that a killed campaign leaves whole lines, and several may append to one file."""
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
