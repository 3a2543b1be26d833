"""The run directory: the only interface between a run and the tools that read it.

RUN/
  recipe.json        the resolved recipe, what looks like a secret redacted
  redacted.json      what recipe.json hides, if anything; for a resume, and readable by its owner alone
  state.json         status of the run: running, finished, stopped, failed, and why
  metrics.jsonl      one line per step; keys under `time/` and `perf/` depend on the clock, all others do not
  waits.json         what the run waits for now, refreshed while it lives (`understudy doctor RUN`)
  usable_ids.json    the token ids that the run may draw and score, for ranks and replays, if not all
  tokenizer/         the student's tokenizer as rollout workers load it, if there are any
  data/              rows that were given as objects (`understudy.distill(data=[…])`), if any
  media/             pictures of the prompts by hash, if any
  spans.jsonl        what ran when (produce, score, update, publish, …)
  samples.jsonl      held-out rollouts of each evaluation
  rollouts/          STEP.jsonl: the rows a step was trained on, as text (`run.rollout_dump_every`)
  profile/           STEP.json.gz: a trace of the step (`run.profile_steps`)
  kept_rows/         STEP.rows, STEP.jsonl: some trained rows with their token columns (`run.keep_rows`)
  dataplane/         journal.sqlite: rows, leases, ledger; dead_letters.jsonl: failed rows with the reason
  loggers/           what tensorboard, wandb, trackio and mlflow write, if the recipe names them
  refused.jsonl      rows whose loss or gradient was not finite, if any
  refused/           all that their update read, for `understudy replay`
  checkpoints/       step-000050/ …, latest, best
  logs/              one file per process
  teachers/          requests of `understudy teachers RUN add | remove`
  teacher_weights/   earlier weights of the student, if a teacher lags behind it
  lock               held while the run lives
  report.html        the page of `understudy view` in one file, written when the run ends
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from understudy.errors import CheckpointError, ConfigError, DataError, RunDirectoryError
from understudy.observability.forks import close_in_forks
from understudy.observability.redact import HIDDEN, hidden_values, redact, restore

_DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run directory, and what makes, opens and locks it. Holds no open file."""

    path: Path

    @property
    def media(self) -> Path:
        """Pictures by hash (`media/store.py`)."""
        return self.path / "media"

    @classmethod
    def create(cls, wanted: str | None, name: str, base: Path = Path("runs")) -> RunDir:
        """Makes a new folder; a folder that already holds a run is never overwritten."""
        if wanted is not None:
            run = cls(Path(wanted))
            run.check_new()
        else:
            run = cls(cls.fresh_path(name, base))
        try:
            run.path.parent.mkdir(parents=True, exist_ok=True)
            # Prompts, rows and samples lie here: a new run directory is its owner's alone.
            run.path.mkdir(mode=0o700, exist_ok=True)
            for folder in (run.logs, run.checkpoints):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_be_made(run.path, error) from None
        return run

    def check_new(self) -> None:
        """Raises if the folder is not empty. What a launch leaves that ended before it could write recipe.json is no run
        yet: the same command begins it anew."""
        if not (_is_free(self.path) or self._is_left_from_a_start()):
            if self.recipe.exists():
                raise RunDirectoryError(
                    f"{self.path} holds a run already; continue it with `understudy resume {self.path}`, or name another folder "
                    "in run.dir"
                )
            raise RunDirectoryError(
                f"{self.path} exists, is not empty and is not a run directory; name another folder in run.dir, or empty it"
            )

    def _is_left_from_a_start(self) -> bool:
        """Whether the folder holds only what is made before recipe.json. A launch that is just there holds the lock."""
        made = {"logs", "checkpoints", "lock", self.redacted.name}
        others = {one.name for one in self.path.iterdir()} - made
        return (
            self.logs.is_dir()
            and self.checkpoints.is_dir()
            and not any(self.checkpoints.iterdir())
            and all(name.startswith((f".{self.recipe.name}.", f".{self.redacted.name}.")) for name in others)
        )

    @staticmethod
    def fresh_path(name: str, base: Path = Path("runs")) -> Path:
        # The random tail separates two launches within one second.
        return base / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        run = cls(Path(path))
        try:
            found = run.recipe.is_file()
        except OSError as error:
            raise RunDirectoryError(f"{run.path} cannot be read ({error.strerror})") from None
        if not found:
            why = "it has no recipe.json" if run.path.exists() else "the folder does not exist"
            raise RunDirectoryError(
                f"{run.path} is not a run directory: {why}; give the folder that a run printed at its start"
            )
        return run

    def write_recipe(self, table: Mapping[str, Any]) -> None:
        """What recipe.json hides is written first: with recipe.json there is a run that can be resumed."""
        hidden = hidden_values(table)
        if hidden or self.redacted.exists():
            write_atomically(self.redacted, json.dumps(hidden, indent=1) + "\n", mode=0o600)
        write_atomically(self.recipe, json.dumps(redact(table), indent=1) + "\n")

    def tables(self) -> dict[str, Any]:
        """The tables of recipe.json, with what it hides."""
        table: dict[str, Any] = read_whole(self.recipe)
        restore(table, self._hidden())
        return table

    def _hidden(self) -> list[dict[str, Any]]:
        return read_whole(self.redacted) if self.redacted.exists() else []

    def check_restored(self, table: Mapping[str, Any], *sections: str) -> None:
        """`ConfigError` if these sections of `tables()`, or all of them, have hidden values that redacted.json lacks."""
        known = [one["value"] for one in self._hidden()]
        part = {name: table.get(name) for name in sections} if sections else table
        lost = [one for one in hidden_values(part) if HIDDEN in one["value"] and one["value"] not in known]
        if lost:
            raise ConfigError(
                [
                    f"{'.'.join(map(str, one['place']))} = {one['value']!r}: recipe.json hides this value, and {self.redacted} does not "
                    f"have it; put that file back, or write the value into {self.recipe}"
                    for one in lost
                ]
            )

    def read_recipe(self) -> dict[str, Any]:
        """The tables of recipe.json, with paths for the folder's current location: it may have been moved
        since the run began."""
        table = self.tables()
        written = Path(table["run"]["dir"] or self.path)  # a recipe.json written by hand may name no folder
        kept, here = f"{RunDir(written).data}{os.sep}", f"{self.data}{os.sep}"

        def found(path: Any) -> Any:
            return here + path.removeprefix(kept) if isinstance(path, str) and path.startswith(kept) else path

        for key, value in table["data"].items():
            table["data"][key] = [found(one) for one in value] if isinstance(value, list) else found(value)
        table["run"]["dir"] = str(self.path)
        return table

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def redacted(self) -> Path:
        return self.path / "redacted.json"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def waits(self) -> Path:
        return self.path / "waits.json"

    @property
    def spans(self) -> Path:
        return self.path / "spans.jsonl"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def dataplane(self) -> Path:
        return self.path / "dataplane"

    @property
    def dead_letters(self) -> Path:
        return self.dataplane / "dead_letters.jsonl"

    @property
    def refused(self) -> Path:
        return self.path / "refused.jsonl"

    @property
    def refused_rows(self) -> Path:
        return self.path / "refused"

    def refused_step(self, step: int | None) -> Path:
        """The rows refused after `step` steps, or those refused last."""
        wanted = "step-*.safetensors" if step is None else f"step-{step:06d}-*.safetensors"
        files = sorted(self.refused_rows.glob(wanted)) if self.refused_rows.is_dir() else []
        if not files:
            which = "no step" if step is None else f"no step after {step} others"
            raise DataError(
                f"{self.path}: {which} was refused; {self.refused_rows} holds the rows of those that were"
            )
        return files[-1]

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def lock(self) -> IO[str]:
        """Held for the life of the training process, so that two processes never write one run."""
        try:
            handle = (self.path / "lock").open("a+")
        except OSError as error:
            raise cannot_be_made(self.path, error) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            handle.close()
            raise RunDirectoryError(
                f"{self.path} is in use by process {owner}; wait for it, or stop it first"
            ) from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        close_in_forks(handle, lambda file: file.close())
        self._sweep()
        return handle

    def _sweep(self) -> None:
        """Removes what killed processes left of `write_atomically`."""
        for left in self.path.glob(".*.*-*.tmp"):
            owner = left.name.split(".")[-2].partition("-")[0]
            if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
                with suppress(OSError):
                    left.unlink()


def cannot_be_made(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"run.dir: the folder {path} cannot be written to ({error.strerror or error}); name another one in run.dir"
    )


def _is_free(path: Path) -> bool:
    """Whether nothing is there yet, or an empty folder."""
    try:
        return not path.exists() or not any(path.iterdir())
    except OSError as error:
        raise cannot_be_made(path, error) from None


def check_free(out: Path) -> None:
    """Raises if a folder to export to is not empty."""
    if not _is_free(out):
        raise CheckpointError(f"{out} exists and is not empty; give a new folder to export to")


def probe_run_dir(wanted: str | None, base: Path = Path("runs"), *, new: bool = True) -> None:
    """Raises if a run directory could not be made, or if `new` and the folder is not empty. Permissions, mounts
    and quotas have many rules, so it makes and removes a folder in the nearest existing one."""
    path = Path(wanted) if wanted is not None else base
    try:
        exists = path.exists()
        if exists and not path.is_dir():
            raise RunDirectoryError(
                f"run.dir = {str(path)!r} is a file; name a folder that does not exist yet"
            )
        nearest = path if exists else next(one for one in path.absolute().parents if one.exists())
        if not nearest.is_dir():
            raise RunDirectoryError(f"run.dir = {str(path)!r}: {nearest} is a file, not a folder")
        os.rmdir(tempfile.mkdtemp(prefix=".understudy-", dir=nearest))
    except OSError as error:
        raise cannot_be_made(path, error) from None
    if new and wanted is not None:
        RunDir(path).check_new()


def cannot_be_written(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} cannot be written: {error.strerror or error}; what was saved before is intact. Free some space or "
        "mend the disk; `understudy resume` continues a run"
    )


def disk_failure(error: BaseException) -> OSError | None:
    """The error as an OSError if it says that a disk is full or fails, otherwise None."""
    if isinstance(error, OSError):
        return error if error.errno in _DISK_FAILURES else None
    # safetensors and tokenizers are written in Rust: their errors have types of their own, and the system's number in the text.
    match = re.search(r"\(os error (\d+)\)", str(error))
    if match is None or int(match[1]) not in _DISK_FAILURES:
        return None
    return OSError(int(match[1]), os.strerror(int(match[1])))


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replaces a file: afterwards it has the old content or the new, complete, even after kill -9. The umask is taken
    off `mode`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=mode)) as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise cannot_be_written(path, error) from error


def copy_durably(source: Path, target: Path) -> Path:
    """A copy that survives a crash once this returns; makes missing folders."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    with target.open("rb") as handle:
        os.fsync(handle.fileno())
    return target


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_whole(path: Path) -> Any:
    """The same of a file without which a run cannot be used. `RunDirectoryError` if it is damaged."""
    try:
        return read_json(path)
    except ValueError as error:
        raise RunDirectoryError(f"{path} is damaged ({error}); put back a copy of it") from None
