"""Checks the arguments of an evaluation before torch is imported, so that a mistake is reported at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from understudy.errors import ConfigError
from understudy.observability.rundir import RunDir
from understudy.planning.models.opened import check_present

_RUNS = "runs"
"""The folder that runs are written to by default: a missing folder in it is no hub id."""


def check_model(model: str, *, best: bool = False) -> RunDir | None:
    """The run that `model` names; None if it is a model. Raises if it is neither."""
    folder = Path(model)
    if (folder / "recipe.json").is_file() or (folder.parts[:1] == (_RUNS,) and not folder.exists()):
        return RunDir.open(folder)
    check_present(model, "model")
    if best:
        raise ConfigError(f"--best chooses among the checkpoints of a run, and {model} is none")
    return None


def check_measurable(
    model: str, data: str | Path | Sequence[str] | None, reward: str | None, *, best: bool = False
) -> None:
    """Raises if there is no such run or model, or nothing to measure it with."""
    run = check_model(model, best=best)
    own = run.read_recipe()["data"] if run is not None else {}
    missing = [
        argument
        for argument, given, key in (("--data FILE", data, "eval"), ("--reward module:function", reward, "reward"))
        if given is None and not own.get(key)
    ]  # fmt: skip
    if missing:
        why = "the run has none of its own" if own else f"{model} is not a run, which would have its own"
        raise ConfigError(
            f"nothing to measure with: give {' and '.join(missing)} (from Python: data, reward); {why}"
        )


def check_counts(
    samples: int | None, k: int | None, max_new_tokens: int | None, max_batch: int | None = None
) -> None:
    """Raises for a number of problems, of samples, of tokens or of answers at a time with which nothing would be measured."""
    given = [
        ("--samples", samples, 1), ("--k", k, 0), ("--max-new-tokens", max_new_tokens, 1), ("--max-batch", max_batch, 1)
    ]  # fmt: skip
    problems = [
        f"{flag} {count}: expected a whole number of at least {least} (from Python: {flag[2:].replace('-', '_')})"
        for flag, count, least in given
        if count is not None and count < least
    ]
    if problems:
        raise ConfigError(problems)


def check_answers(path: Path | None) -> None:
    """Raises for a file that answers could not be written to once they are made."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--answers {path} is a folder; name a file")
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        why = "cannot be written to" if folder.is_dir() else "does not exist"
        raise ConfigError(f"--answers {path}: the folder {folder} {why}; make it, or name another file")
