"""Log lines as text or JSON, one per record, with the id of the HTTP request.

Only the command line configures logging.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime

from tqdm.contrib.logging import logging_redirect_tqdm

LEVELS = ("debug", "info", "warning", "error")
LOAD_SECONDS = 5.0  # interval of the lines about a server's load
ACCESS = "specjax.access"  # logger with one line per answered HTTP request
# id of the HTTP request that the current context serves
request_id: ContextVar[str] = ContextVar("request_id", default="")


class TextFormatter(logging.Formatter):
    """Writes time, level, logger, message and request id; only tracebacks are indented."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        if name := request_id.get():
            line += f" [{name}]"
        lines = [line]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        return "\n  ".join(map(_escape, lines))


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per record, with the members of ``record.fields`` if set."""

    def format(self, record: logging.LogRecord) -> str:
        members = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        members |= {"message": record.getMessage()} | getattr(record, "fields", {})
        if name := request_id.get():
            members["request_id"] = name
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json.dumps(members)


# "plain" is for commands whose lines a person reads as they appear
FORMATS = {"text": TextFormatter(), "json": JsonFormatter(), "plain": logging.Formatter()}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _escape(text: str) -> str:
    """Escape control characters, line separators and marks that reorder text."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def discard_output() -> None:
    """Discard output from now on; flushing a closed pipe at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def configured(level: str, kind: str, *, has_access: bool) -> Iterator[None]:
    """Write log lines to standard error, above a progress bar.

    Args:
        level: minimum level of this package's lines. Other packages log warnings and errors.
        kind: a name in ``FORMATS``.
        has_access: also write the lines of ``ACCESS``, at any ``level``.
    """
    root, package, access = map(logging.getLogger, (None, "specjax", ACCESS))
    previous_levels = [(logger, logger.level) for logger in (root, package, access)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATS[kind])
    root.addHandler(handler)
    package.setLevel(level.upper())
    root.setLevel(max(logging.WARNING, package.level))
    access.setLevel(min(logging.INFO, package.level) if has_access else logging.WARNING)
    try:
        with logging_redirect_tqdm():
            yield
    finally:
        root.removeHandler(handler)
        for logger, number in previous_levels:
            logger.setLevel(number)
