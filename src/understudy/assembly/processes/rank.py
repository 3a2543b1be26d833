"""The process of one rank 1 … n−1 of a run.

    python -m understudy.assembly.processes.rank --run RUN --rank 1 --size 2 --coordination FOLDER …

    read the run's recipe ─> load the student ─> join the group ─> write the ready file ─> follow rank 0

It ends on rank 0's command, and at once when the pipe given by `--watch-fd` closes, because then its launcher
is gone.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from understudy.assembly.cpu_threads import set_up_torch
from understudy.assembly.learner import load_source, objective_of, policy_settings
from understudy.assembly.ranks import join_at, joining_file, mark_file, refusal_file
from understudy.assembly.this_machine import settings_of_run
from understudy.assembly.usable_ids import kept_usable_ids
from understudy.errors import LOST_PEER, UnderstudyError
from understudy.media.store import MediaStore
from understudy.observability.rundir import RunDir, write_atomically
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import follow
from understudy.policy.ranks.shard import is_about_a_connection, leave, rank_gpu
from understudy.serving.process import Process, process_arguments, process_main
from understudy.serving.supervisor import beat
from understudy.trainers.remote_rows.batches import QueueRows

logger = logging.getLogger(__name__)


def run(process: Process) -> None:
    options = process.args
    run = RunDir.open(options.run)
    settings = settings_of_run(run)
    set_up_torch(settings.compute, share_of=options.size)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank_gpu(options.rank, settings.student.device))
    source = settings.student
    student = load_source(source).with_pictures(MediaStore(run.media), source.model, source.revision)
    joining_file(options.coordination, options.rank).touch()
    group = join_at(options.rank, options.size, options.rendezvous, student.device)
    try:
        beat(mark_file(options.coordination, options.rank))
        own = policy_settings(settings.learn, kept_usable_ids(run))
        policy = Policy(student.model, own, ranks=group, pictures=student.pictures)
        process.ready(rank=options.rank)

        def refuse(number: int, reason: str) -> None:
            write_atomically(refusal_file(options.coordination, number, options.rank), reason)

        rows: list[QueueRows] = []

        def open_rows(address: str) -> QueueRows:
            rows.append(QueueRows(address, settings.rows.fetch_seconds))
            return rows[-1]

        follow(policy, objective_of(settings.learn.loss), group, refuse, open_rows)
        for opened in rows:
            logger.info("fetched %d bytes of rows", opened.bytes_got)
            opened.close()
        leave()
    except UnderstudyError:
        raise
    except Exception as error:
        # A rank sees another rank's end as a broken connection. The other rank's error is the cause to
        # report.
        if not is_about_a_connection(error):
            raise
        traceback.print_exc()
        raise SystemExit(LOST_PEER) from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = process_arguments("understudy.assembly.processes.rank", __doc__, serves=False)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="ranks in all, the trainer's own included")
    parser.add_argument(
        "--coordination", type=Path, required=True, help="the folder with the marks of all ranks"
    )
    parser.add_argument(
        "--rendezvous", required=True, help="where they meet: tcp://HOST:PORT or file:///PATH"
    )
    return process_main(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
