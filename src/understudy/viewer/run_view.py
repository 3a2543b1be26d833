"""One run as the page sees it: its indexes, brought up to date by one thread, and the answers to its questions."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from understudy.dataplane import kept_rows
from understudy.errors import UnderstudyError
from understudy.media.pictures import media_type
from understudy.media.store import MediaStore
from understudy.observability.advisories.gather import advisories_of
from understudy.observability.advisories.history import History
from understudy.observability.lines import GrowingFile, record
from understudy.observability.report import accuracy_table, note_of
from understudy.observability.rundir import RunDir, read_json
from understudy.observability.watchdog import run_status
from understudy.viewer.journal_rows import JournalRows, first_written, journal_line
from understudy.viewer.rows import Chunk, RowTable, media_of
from understudy.viewer.spans import SpanIndex
from understudy.viewer.token_text import TokenText, find_tokenizer
from understudy.viewer.token_view import candidates, token_view

_PIECE = 4 << 20
"""Bytes of a file read before requests get their turn."""
_FILES_AT_ONCE = 8
_JOURNAL_ROWS = 5000
MOST_PICTURE_BYTES = 32 << 20
"""A larger picture is not shown; `data.max_image_bytes` is 20 MiB unless set."""
_ANSWERS = 3
"""Held-out prompts of each source whose answers are shown side by side."""


class NotFound(UnderstudyError):
    """The page asked for something that is not there (any more)."""


class RunView:
    """Thread-safe: one lock; `look` is called by the server's thread, all else by requests."""

    def __init__(self, run: RunDir, journal: bool = True) -> None:
        """`journal` False: without rows in flight."""
        self.run = run
        self._lock = threading.RLock()
        self._metrics = GrowingFile(run.metrics, self._forget_metrics)
        self._history = History()
        self._lines: list[dict[str, Any]] = []
        """Lines with held-out accuracies, for the table."""
        self._spans = SpanIndex(run.spans)
        self._rows = RowTable()
        self._files: dict[Path, tuple[int, int]] = {}
        """Dumps and kept rows that were read: (size, time of change)."""
        self._samples = GrowingFile(run.samples, self._forget_samples)
        self._forget_samples()
        self._reads_journal, self._journal = journal, JournalRows(run.dataplane)
        self._journal_state: tuple[float, int] = (0.0, 0)
        self._text: TokenText | None = None
        self.complete = False
        """Whether everything that is on disk was read."""

    # Status

    def state(self) -> dict[str, Any]:
        return _table(self.run.state)

    def waits(self) -> dict[str, Any]:
        return _table(self.run.waits)

    def status(self) -> str:
        return run_status(self.state(), self.waits())

    def recipe(self) -> dict[str, Any]:
        return _table(self.run.recipe)

    def summary(self) -> dict[str, Any]:
        with self._lock:
            steps, complete, rows = self._history.steps, self.complete, len(self._rows)
            seconds = sum(self._history.get("time/step").values)
        state = self.state()
        facts = {"objective": state.get("objective"), "training time, s": round(seconds)}
        facts |= {"rows trained": state.get("rows_trained"), "rows dead-lettered": state.get("dead_letters")}
        recipe, path = self.recipe(), shlex.quote(str(self.run.path))
        status = self.status()
        commands = {}
        if any(self.run.checkpoints.glob("step-*")):
            data = recipe.get("data") or {}
            best = " --best" if (self.run.checkpoints / "best").is_file() else ""
            if data.get("eval") and data.get("reward"):
                commands["evaluate"] = f"understudy eval {path}{best}"
            commands["export"] = f"understudy export {path} my-student{best}"
        if status in ("stopped", "killed", "failed"):
            commands = {"resume": f"understudy resume {path}", **commands}
        return {
            "name": self.run.path.resolve().name,
            "path": str(self.run.path),
            "status": status,
            "detail": str(state.get("detail") or ""),
            "steps": steps,
            "of_steps": (recipe.get("trainer") or {}).get("steps"),
            "rows": rows,
            "complete": complete,
            "note": note_of(self.run),
            "commands": commands,
            "facts": {name: value for name, value in facts.items() if value not in (None, "")},
        }

    # Reading on

    def look(self, piece: int = _PIECE, files: int = _FILES_AT_ONCE) -> bool:
        """Reads at most `piece` bytes of each file that is new, and this many files of rows; whether there is more to
        read at once."""
        with self._lock:
            more = self._look_metrics(piece)
        with self._lock:
            more = self._look_samples(piece) or more
        more = self._look_row_files(files) or more
        with self._lock:
            more = self._spans.look(piece) or more
        if self._reads_journal:
            self._look_journal()
        self.complete = self.complete or not more
        return more

    def _look_metrics(self, piece: int) -> bool:
        before = self._metrics.place
        for _, text in self._metrics.new_lines(piece):
            line = record(text)
            if line is not None:
                self._history.add(line)
                if any(key.startswith("val/") for key in line):
                    self._lines.append(
                        {key: value for key, value in line.items() if key[:4] in ("step", "val/")}
                    )
        return self._metrics.place - before >= piece

    def _forget_metrics(self) -> None:
        self._history, self._lines = History(), []

    def _forget_samples(self) -> None:
        self._held_out = Chunk("held-out", 0, self.run.samples)
        self._rows.replace(self._held_out)

    def _look_samples(self, piece: int) -> bool:
        before = self._samples.place
        for offset, text in self._samples.new_lines(piece):
            line = record(text)
            if line is not None:
                who = line.get("model", "student")
                shown = {**line, "teacher": "" if who == "student" else who}
                self._rows.add(self._held_out, shown, (offset, len(text)))
        if self._samples.place != before:
            self._rows.touched()
        return self._samples.place - before >= piece

    def _look_row_files(self, most: int) -> bool:
        """The newest steps first, a few files at a time."""
        fresh = []
        for kind, folder in (("kept", self.run.path / kept_rows.FOLDER_NAME), ("dump", self.run.rollouts)):
            for path in folder.glob("*.jsonl") if folder.is_dir() else ():
                try:
                    found = path.stat()
                except OSError:
                    continue
                if path.stem.isdecimal() and self._files.get(path) != (found.st_size, found.st_mtime_ns):
                    fresh.append((int(path.stem), kind, path, (found.st_size, found.st_mtime_ns)))
        for path in [path for path in self._files if not path.exists()]:
            with self._lock:
                del self._files[path]
                kind = "dump" if path.parent == self.run.rollouts else "kept"
                self._rows.chunks.pop((kind, int(path.stem)), None)
                self._rows.touched()
        fresh.sort(reverse=True)
        for step, kind, path, stamp in fresh[:most]:
            with self._lock:
                self._rows.read_file(kind, step, path)
                self._files[path] = stamp
        return len(fresh) > most

    def _look_journal(self) -> None:
        """Journal rows change all the time while a run lives: they are read again when the file changed, at
        most every few seconds."""
        file = self.run.dataplane / "journal.sqlite"
        stamps = []
        for path in (file, file.with_name(file.name + "-wal")):
            try:
                stamps.append(path.stat().st_mtime_ns)
            except OSError:
                stamps.append(0)
        last, seen = self._journal_state
        if not stamps[0] or seen == max(stamps) or time.monotonic() - last < 5.0:
            return
        text = self.text()
        chunk = Chunk("journal", 0, None)
        try:
            for number, key, tags, columns in self._journal.rows(self.status() == "running", 0):
                first, tokens = first_written(columns), np.asarray(columns["tokens"]).tolist()
                chunk.text.append((text.text(tokens[:first]), text.text(tokens[first:])))
                line = {**journal_line(key, tags, columns), "prompt": chunk.text[-1][0]}
                self._rows.add(chunk, line, (number, 0))
                chunk.media.append(media_of(line))
                if len(chunk.keys) >= _JOURNAL_ROWS:
                    break
        except (UnderstudyError, OSError, ValueError, KeyError):
            # The journal cannot be read now (it is being rewound, say): shown without rows in flight.
            chunk = Chunk("journal", 0, None)
        with self._lock:
            self._rows.replace(chunk)
            self._journal_state = (time.monotonic(), max(stamps))

    # Answers

    def metric_names(self) -> list[str]:
        with self._lock:
            return sorted(self._history.series)

    def curves(self, keys: list[str], points: int) -> dict[str, Any]:
        """Steps and values of each key, thinned to `points`: each bucket keeps its lowest and highest value."""
        with self._lock:
            series = {key: self._history.get(key) for key in keys}
            return {key: _thinned(one.steps, one.values, points) for key, one in series.items() if len(one)}

    def held_out(self) -> dict[str, Any]:
        with self._lock:
            return {"table": accuracy_table(self._lines), "answers": self._rows.answers(_ANSWERS)}

    def advisories(self) -> list[dict[str, Any]]:
        with self._lock:
            found = advisories_of(self.run, self._history, self.status() == "running")
        return [asdict(one) for one in found]

    def rows(self, **given: Any) -> dict[str, Any]:
        with self._lock:
            return {**self._rows.select(**given), "choices": self._rows.choices(), "complete": self.complete}

    def timeline(self, first: float | None, last: float | None) -> dict[str, Any]:
        with self._lock:
            return self._spans.window(first, last)

    def life(self, key: str) -> list[dict[str, Any]]:
        with self._lock:
            return self._spans.of_key(key)

    def text(self) -> TokenText:
        if self._text is None or not self._text.found:
            self._text = TokenText(
                find_tokenizer(self.run.path, (self.recipe().get("student") or {}).get("model"))
            )
        return self._text

    def row(self, wanted: str, first: int = 0, at: int | None = None) -> dict[str, Any]:
        """One row: its summary, its text, and, where its columns are kept, tokens with measures: those from
        `first` on, or around written token `at`."""
        with self._lock:
            found = self._rows.find(wanted)
            if found is None:
                raise NotFound(
                    f"row {wanted} is not in this run any more: it was trained, or dropped for the budget of run.keep_rows"
                )
            chunk, row = found
            table = self._rows.arrays()
            place = [one is chunk for one in table["chunks"]].index(True)
            index = int(np.flatnonzero((table["chunk"] == place) & (table["row"] == row))[0])
            detail = self._rows.summary(index)
            detail["line"] = {} if chunk.text else self._rows.line(chunk, row)
            detail["prompt"], detail["completion"] = self._rows.text(chunk, row)
            detail["prompt_sum"] = chunk.prompts[row]
        columns = self.columns(wanted)
        return detail | ({} if columns is None else token_view(columns, self.text(), first, at))

    def picture(self, name: str) -> tuple[bytes, str]:
        """(bytes, type) of a picture of this run, by its hash."""
        store = MediaStore(self.run.media)
        path = store.path(name)
        if not path.is_file():
            raise NotFound(f"the picture {name[:12]}… is not in {self.run.media}")
        if path.stat().st_size > MOST_PICTURE_BYTES:
            raise NotFound(f"the picture {name[:12]}… has more than {MOST_PICTURE_BYTES} bytes")
        data = store.get(name)
        if (kind := media_type(data)) is None:
            raise NotFound(f"{name[:12]}… is not a picture")
        return data, kind

    def columns(self, wanted: str) -> dict[str, Any] | None:
        """The token columns of a row; None for text alone."""
        with self._lock:
            found = self._rows.find(wanted)
            if found is None:
                raise NotFound(f"row {wanted} is not in this run any more")
            chunk, row = found
            line = {} if chunk.text else self._rows.line(chunk, row)
        if chunk.kind == "kept":
            return kept_rows.read_columns(self.run.path / kept_rows.FOLDER_NAME, chunk.name, line)
        if chunk.kind == "journal":
            return self._journal.one(self.status() == "running", chunk.places[row][0])
        return None

    def candidates(self, wanted: str, first: int, last: int) -> list[dict[str, Any]]:
        """What teacher and student would have written at written tokens `first` to `last`."""
        columns = self.columns(wanted)
        return [] if columns is None else candidates(columns, self.text(), first, last)

    def worst(self, step: int | None) -> list[dict[str, Any]]:
        """The tokens on which teacher and student disagree most, grouped by what the teacher wanted."""
        with self._lock:
            found = self._rows.worst(step)
        text = self.text()
        groups: dict[int, dict[str, Any]] = {}
        for row, key, at, (place, number, gap, wanted) in found:
            name = text.one(wanted) if wanted >= 0 else "(not recorded)"
            group = groups.setdefault(wanted, {"wanted": name, "id": wanted, "tokens": []})
            token = {"row": row, "key": key, "step": at, "place": place, "text": text.one(number), "gap": gap}
            group["tokens"].append(token)
        return sorted(groups.values(), key=lambda group: -sum(one["gap"] for one in group["tokens"]))

    def spread(self, kind: str, most: int) -> list[dict[str, Any]]:
        """At most `most` rows of a kind: half of them those with the largest KL, the others over all steps."""
        with self._lock:
            return self._rows.spread(kind, most)

    def lives(self, keys: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        with self._lock:
            return self._spans.of_keys(keys)

    def same_prompt(self, checksum: int) -> list[dict[str, Any]]:
        with self._lock:
            return self._rows.same_prompt(checksum)


def _table(file: Path) -> dict[str, Any]:
    """The JSON object in a file of the run; empty if it is missing or damaged."""
    try:
        found = read_json(file)
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _thinned(steps: Any, values: Any, points: int) -> list[list[float]]:
    if len(steps) <= points:
        return [list(steps), list(values)]
    y, kept = np.frombuffer(values), []
    for part in np.array_split(np.arange(len(y)), max(1, points // 2)):
        kept += sorted({int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])})
    return [[int(steps[i]) for i in kept], [float(y[i]) for i in kept]]
