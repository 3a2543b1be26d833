"""Checkpoints that stay complete whenever the process is killed.

    checkpoints/
      .tmp-step-000123-4711/   being written; after a crash it is removed at the next start
      step-000100/             complete: it got its name by one rename
        model.safetensors  optimizer.safetensors  state.json
        manifest.json          size and sha256 of each file, written last
      step-000123/
      latest                   the name of the newest, replaced atomically
      best                     any other mark; a marked checkpoint is never pruned

Order of a save: files → fsync → manifest → fsync → rename → fsync of the folder → `latest`. A kill before
the rename leaves the previous checkpoint as it was; one after it leaves a complete new one. Loading follows
`latest`, checks every hash, and falls back to the previous checkpoint with a warning. No pickle is read or
written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from understudy.errors import CheckpointError
from understudy.observability.faults import point
from understudy.policy.checkpoints.durable import (
    STEP_FOLDER,
    replace_text,
    saved_steps,
    sha256_of,
    sync_directory,
    sync_file,
    write_text,
)
from understudy.policy.checkpoints.state import PolicyState, storable

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, MANIFEST_FILE = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)
LATEST = "latest"
_TEMPORARY, _REPLACED = ".tmp-", ".replaced-"
_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint, read and verified."""

    path: Path
    step: int
    policy: PolicyState
    """Without the optimizer's tensors if it was loaded as a model."""
    extra: Mapping[str, Any]
    """What the caller gave to `save`, unchanged: data cursor, journal position, teacher manifests …"""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that did not verify, each with the reason; usually empty."""


class CheckpointStore:
    """The checkpoints of one run, in one folder, with one writer."""

    def __init__(self, root: Path | str, keep: int = 2) -> None:
        if keep < 2:
            raise CheckpointError(
                f"keep = {keep}: at least 2 checkpoints are kept, so that a torn one has a predecessor"
            )
        self.root = Path(root)
        self.keep = keep
        self.begun: int | None = None
        """The newest step whose save has begun; set by `BackgroundSaver`."""
        self._cleared = False

    def save(self, step: int, policy: PolicyState, extra: Mapping[str, Any] | None = None) -> Path:
        """Writes the checkpoint of `step` and makes it the latest; on any failure the previous ones are untouched."""
        self.root.mkdir(parents=True, exist_ok=True)
        if not self._cleared:
            self.recover()
        final = self.root / _name(step)
        temporary = self.root / f"{_TEMPORARY}{final.name}-{os.getpid()}"
        state = _state_text(step, policy, extra or {})
        self._require_space(_size(policy) + len(state) + _MARGIN_BYTES)
        try:
            self._write(temporary, step, policy, state)
            self._put_in_place(temporary, final)
            point("checkpoint.before_latest")
            replace_text(self.root / LATEST, final.name + "\n")
        except (OSError, SafetensorError) as error:
            self.recover()
            raise CheckpointError(
                f"could not save the checkpoint of step {step} in {self.root}: {error}; "
                f"the previous checkpoints are intact, free some space or set another run directory, then resume"
            ) from error
        point("checkpoint.before_prune")
        try:
            self._prune()
        except OSError as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.root, error)
        point("checkpoint.saved")
        return final

    def load(self, step: int | None = None, *, optimizer: bool = True) -> Checkpoint:
        """The latest checkpoint that verifies, or the one of `step` (then without a fallback).

        With `optimizer = False` the optimizer's file is neither verified nor read: a model needs the weights alone.
        Reads only, so it may be called on the folder of a run that is still saving.
        """
        if step is not None:
            path = self.root / _name(step)
            if not path.is_dir():
                raise CheckpointError(
                    f"no checkpoint of step {step} in {self.root}; there are steps {self.steps()}"
                )
            return self._read(path, optimizer)
        skipped: list[str] = []
        for path in self._newest_first():
            try:
                return self._read(path, optimizer, tuple(skipped))
            except CheckpointError as error:
                logger.warning("%s; trying the checkpoint before it", error)
                skipped.append(str(error))
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self.root} is whole: {'; '.join(skipped)}. Put back a copy of one, or start again with another run.dir"
            )
        raise CheckpointError(f"no checkpoint in {self.root}; was one saved before the run stopped?")

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints after `step`, up to the latest. A run that goes back past damaged ones calls it: a
        damaged one would count among the `keep` newest, and push out the only whole one."""
        latest = self.latest() or 0
        for newer in (one for one in self.steps() if step < one <= latest):
            self._remove(newer)
            logger.warning("the checkpoint of step %d in %s is removed", newer, self.root)

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint folder, ascending."""
        return saved_steps(self.root)

    def resumable(self) -> list[int]:
        """The steps a resume may return to, ascending: the newest `keep`. A marked one that is older stays
        only to be used as a model."""
        latest = self.latest()
        return [step for step in self.steps() if latest is not None and step <= latest][-self.keep :]

    def needed(self) -> list[int]:
        """The steps that a resume may return to now, and the one that it may return to once it is saved."""
        return [*self.resumable(), *([] if self.begun is None else [self.begun])]

    def latest(self) -> int | None:
        """The step that `latest` names, or the newest one if that file is missing; None without any
        checkpoint."""
        steps = self.steps()
        marked = self.marked(LATEST)
        return marked if marked in steps else (steps[-1] if steps else None)

    def mark(self, name: str, step: int) -> None:
        """Gives a checkpoint a name (`best`); a named checkpoint is not pruned."""
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or STEP_FOLDER.fullmatch(name):
            raise CheckpointError(f"a mark is a lower-case word such as 'best', got {name!r}")
        if step not in self.steps():
            raise CheckpointError(
                f"cannot mark step {step} as {name!r}: there are checkpoints of steps {self.steps()}"
            )
        replace_text(self.root / name, _name(step) + "\n")

    def marked(self, name: str) -> int | None:
        """The step a mark names, or None."""
        try:
            match = STEP_FOLDER.fullmatch((self.root / name).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError):
            return None
        return int(match[1]) if match else None

    def recover(self) -> list[str]:
        """Removes what a crash left behind; returns the names of what was removed or restored.

        Only the one writer of this folder may call it; the first `save` does, and a run that resumes should.
        """
        self._cleared = True
        handled: list[str] = []
        if not self.root.is_dir():
            return handled
        for path in sorted(self.root.iterdir()):
            if path.name.startswith(_REPLACED):
                original = self.root / path.name.removeprefix(_REPLACED).rsplit("-", 1)[0]
                if not original.exists():
                    os.rename(path, original)
                    handled.append(path.name)
                    continue
            if path.name.startswith((_TEMPORARY, _REPLACED)):
                shutil.rmtree(path)
                handled.append(path.name)
            elif path.is_file() and path.name.startswith(".") and path.name.endswith(".tmp"):
                path.unlink()
                handled.append(path.name)
        return handled

    def _write(self, folder: Path, step: int, policy: PolicyState, state: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        point("checkpoint.before_model")
        save_file(storable(policy.model), folder / MODEL_FILE)
        point("checkpoint.before_optimizer")
        save_file(storable(policy.optimizer), folder / OPTIMIZER_FILE)
        point("checkpoint.before_state")
        write_text(folder / STATE_FILE, state)
        for name in (MODEL_FILE, OPTIMIZER_FILE):
            sync_file(folder / name)
        point("checkpoint.before_manifest")
        files = {
            name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
            for name in (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)
        }
        manifest = {"format": FORMAT, "step": step, "files": files}
        write_text(folder / MANIFEST_FILE, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        sync_directory(folder)

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        """One rename. An existing folder of the same step (a re-run after a fallback) is moved aside until
        the new one is in place."""
        aside = self.root / f"{_REPLACED}{final.name}-{os.getpid()}"
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(final, aside)
        point("checkpoint.before_rename")
        os.rename(temporary, final)
        sync_directory(self.root)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self) -> None:
        """Deletes the oldest beyond `keep`, never a marked one. Checkpoints of steps after the latest (left
        over from a deliberate return to an earlier step) are deleted first: nothing refers to them any more.
        """
        latest = self.latest()
        marked = {self.marked(path.name) for path in self.root.iterdir() if path.is_file()}
        ordered = sorted(
            self.steps(), key=lambda step: (latest is not None and step <= latest, step), reverse=True
        )
        for step in ordered[self.keep :]:
            if step not in marked:
                self._remove(step)

    def _remove(self, step: int) -> None:
        doomed = self.root / f"{_TEMPORARY}{_name(step)}-removed"
        shutil.rmtree(doomed, ignore_errors=True)  # of a removal that was cut short
        os.rename(self.root / _name(step), doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _newest_first(self) -> list[Path]:
        latest = self.latest()
        return [
            self.root / _name(step) for step in reversed(self.steps()) if latest is None or step <= latest
        ]

    def _read(self, path: Path, optimizer: bool, skipped: tuple[str, ...] = ()) -> Checkpoint:
        step = _verified_step(path, optimizer)
        try:
            state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
            moments = load_file(path / OPTIMIZER_FILE) if optimizer else {}
            policy = PolicyState(load_file(path / MODEL_FILE), moments, state["policy"])
            return Checkpoint(path, step, policy, state["extra"], skipped)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error

    def _require_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise CheckpointError(
                f"a checkpoint needs {needed / 1e9:.3f} GB and {self.root} has {free / 1e9:.3f} GB free; "
                "the previous checkpoints are intact, free some space or set another run directory, then resume"
            )


def verify(path: Path | str, *, optimizer: bool = True) -> None:
    """Checks a checkpoint folder against its manifest, the optimizer's file only if `optimizer`; raises CheckpointError that
    names the first file that differs."""
    _verified_step(Path(path), optimizer)


def is_whole(root: Path, step: int) -> bool:
    """Whether the checkpoint of a step is as its manifest says."""
    try:
        return _verified_step(root / _name(step)) == step
    except CheckpointError:
        return False


def _verified_step(path: Path, optimizer: bool = True) -> int:
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        version, step, files = manifest["format"], int(manifest["step"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path} is torn: its {MANIFEST_FILE} cannot be read ({error})"
        ) from error
    if version != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {version}, this version reads format {FORMAT}")
    if path.name != _name(step):
        raise CheckpointError(f"checkpoint {path} holds step {step}: the folder was renamed or mixed up")
    for name in (MODEL_FILE, *([OPTIMIZER_FILE] if optimizer else []), STATE_FILE):
        file, expected = path / name, files.get(name)
        if expected is None or not file.is_file():
            raise CheckpointError(f"checkpoint {path} is torn: {name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"checkpoint {path} is torn: {name} has {file.stat().st_size} bytes, the manifest says {expected['bytes']}"
            )
        if sha256_of(file) != expected["sha256"]:
            raise CheckpointError(
                f"checkpoint {path} is damaged: the sha256 of {name} differs from the manifest"
            )
    return step


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _state_text(step: int, policy: PolicyState, extra: Mapping[str, Any]) -> str:
    try:
        return json.dumps({"step": step, "policy": dict(policy.progress), "extra": dict(extra)}, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the extra state of step {step} is not plain JSON: {error}") from error


def _size(policy: PolicyState) -> int:
    tensors = [*policy.model.values(), *policy.optimizer.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
