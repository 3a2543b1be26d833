"""One log file per process in RUN/logs, secrets redacted."""

from __future__ import annotations

import logging
from pathlib import Path

from understudy.observability.redact import redact_text


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


def log_to(path: Path, level: int = logging.INFO) -> logging.Handler:
    """Sends all log records below `understudy` to a file; returns the handler, so that a run can remove it
    again."""
    handler = logging.FileHandler(path)
    handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("understudy")
    logger.setLevel(level)
    logger.addHandler(handler)
    return handler
