"""One log file per process in RUN/logs: secrets redacted, control characters escaped."""

from __future__ import annotations

import logging
from pathlib import Path

from understudy.observability.redact import printable, redact_text


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # Later lines of a record are indented: text with a newline cannot imitate a record of its own.
        return printable(redact_text(super().format(record))).replace("\n", "\n    ")


def log_to(path: Path, level: int = logging.INFO) -> logging.Handler:
    """Sends all log records below `understudy` to a file; returns the handler, so that a run can remove it
    again."""
    handler = logging.FileHandler(path)
    handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("understudy")
    logger.setLevel(level)
    logger.addHandler(handler)
    return handler
