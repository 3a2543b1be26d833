"""The process of one rank 1 … n−1 of a run.

    python -m understudy.assembly.processes.rank --run RUN --rank 1 --size 2 --meeting FOLDER …

    read the run's recipe ─> load the student ─> join the group ─> write the ready file ─> follow rank 0

It ends on rank 0's command, and at once when the pipe given by `--watch-fd` closes, because then its launcher
is gone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from understudy.assembly.build import load_student_of, objective_of, policy_settings, steady_torch
from understudy.assembly.rank_heartbeat import beat
from understudy.assembly.ranks import FAILED, LOST_COMPANY, door_file, join_at, refusal_file
from understudy.assembly.usable_ids import kept_usable_ids
from understudy.config import parse_recipe
from understudy.errors import UnderstudyError
from understudy.observability.rundir import RunDir, read_json, write_atomically
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import follow
from understudy.policy.ranks.shard import is_about_a_connection, leave
from understudy.serving.child import end_with_launcher, write_ready_file
from understudy.trainers.remote_rows.batches import QueueRows

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if options.watch_fd is not None:
        end_with_launcher(options.watch_fd, code=LOST_COMPANY)
    joined = False
    try:
        run = RunDir.open(options.run)
        recipe = parse_recipe(read_json(run.recipe))
        steady_torch(recipe, share_of=options.size)
        if torch.cuda.is_available():
            torch.cuda.set_device(options.rank % torch.cuda.device_count())
        student = load_student_of(recipe)
        door_file(options.meeting, options.rank).touch()
        group = join_at(options.rank, options.size, options.rendezvous, student.device)
        joined = True
        beat(options.meeting, options.rank)
        policy = Policy(student.model, policy_settings(recipe, kept_usable_ids(run)), ranks=group)
        write_ready_file(options.ready_file, rank=options.rank)

        def refuse(number: int, reason: str) -> None:
            write_atomically(refusal_file(options.meeting, number, options.rank), reason)

        rows: list[QueueRows] = []

        def open_rows(address: str) -> QueueRows:
            rows.append(QueueRows(address, recipe.dataplane.queue_timeout_seconds))
            return rows[-1]

        follow(policy, objective_of(recipe), group, refuse, open_rows)
        for source in rows:
            logger.info("fetched %d bytes of rows", source.bytes_got)
            source.close()
        leave()
    except UnderstudyError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except Exception as error:
        traceback.print_exc()
        # A rank sees another rank's end as a broken connection. The other rank's error is the cause to
        # report.
        return LOST_COMPANY if joined and is_about_a_connection(error) else FAILED
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m understudy.assembly.processes.rank", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="ranks in all, the trainer's own included")
    parser.add_argument("--meeting", type=Path, required=True, help="the folder where ranks leave notes")
    parser.add_argument(
        "--rendezvous", required=True, help="where they meet: tcp://HOST:PORT or file:///PATH"
    )
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--watch-fd", type=int)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
