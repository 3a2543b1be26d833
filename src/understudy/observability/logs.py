"""One log file per process in RUN/logs: secrets redacted, control characters escaped."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

from understudy.observability.redact import printable, redact_text


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # Later lines of a record are indented: text with a newline cannot imitate a record of its own.
        return printable(redact_text(super().format(record))).replace("\n", "\n    ")


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk costs records: the stack trace that logging would print hides the run's own error."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def log_to(path: Path, level: int = logging.INFO) -> logging.Handler:
    """Sends all log records below `understudy` to a file; returns the handler, so that a run can remove it
    again."""
    handler = _LogFile(path)
    handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("understudy")
    logger.setLevel(level)
    logger.addHandler(handler)
    return handler
