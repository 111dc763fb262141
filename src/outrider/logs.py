"""Standard `logging` under the name "outrider", to stderr.

Every record carries role, rank and request id, so that the logs of many processes can be merged
and one request followed through all of them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from outrider.errors import ConfigError
from outrider.log_stream import DroppingStream, dropped_line, never_blocking

logger = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")
LAST_LINES = 15
_LAST_BYTES = 16 * 2**10
_NO_REQUEST = "-"
_request_id: ContextVar[str] = ContextVar("outrider_request_id", default=_NO_REQUEST)


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Records written inside, in this thread or task, carry that request id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def setup_logging(
    level: str = "info", role: str = "engine", rank: int = 0, *, json_lines: bool | None = None
) -> None:
    """Send our records to stderr. May be called again; the last call wins. Without `json_lines`
    the format stays as it is; it starts as text.

    Configures only the logger "outrider", never the application's or other libraries' logging.
    A stalled reader of stderr blocks nothing; see `outrider.log_stream`.
    """
    if level not in LEVELS:
        raise ConfigError(f"log_level is {level!r}; it must be one of {', '.join(LEVELS)}.")
    logger = logging.getLogger("outrider")
    if json_lines is None:
        json_lines = any(isinstance(each.formatter, _JsonFormatter) for each in logger.handlers)
    stream = never_blocking(sys.stderr)
    handler = logging.StreamHandler(stream)
    handler.addFilter(_Stamp(role, rank))
    handler.setFormatter(_JsonFormatter() if json_lines else _LineFormatter())
    if isinstance(stream, DroppingStream):
        stream.format_dropped = partial(_format_dropped, handler)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def _format_dropped(handler: logging.Handler, num_lines: int) -> str:
    text = dropped_line(num_lines)
    record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
    handler.filter(record)
    return handler.format(record)


def open_log(path: Path) -> IO[bytes]:
    """A log file for a child process's output; /dev/null if the file cannot be opened."""
    try:
        return path.open("ab")
    except OSError as error:
        logger.warning("%s cannot be written, so no log is kept: %s", path, error.strerror)
        return open(os.devnull, "ab")


def last_lines(path: Path | str, start: int = 0) -> list[str]:
    """The last lines of a process's log, which begins at byte `start` of the file."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
    return text.splitlines()[-LAST_LINES:]


class _Stamp(logging.Filter):
    """Puts role, rank and request id on each record."""

    def __init__(self, role: str, rank: int) -> None:
        super().__init__()
        self._role = role
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = self._role
        record.rank = self._rank
        record.request_id = _request_id.get()
        return True


class _LineFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(
            "{asctime}.{msecs:03.0f} {levelname:<7} {role}/{rank} {request_id} {name}: {message}",
            datefmt="%Y-%m-%d %H:%M:%S",
            style="{",
        )


class _JsonFormatter(logging.Formatter):
    """One JSON object per line, time in UTC. Includes the record's own `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": vars(record)["role"],
            "rank": vars(record)["rank"],
            "request_id": _known(vars(record)["request_id"]),
            "logger": record.name,
            "message": record.getMessage(),
        }
        own = vars(record).get("fields", {})
        fields |= {name: value for name, value in own.items() if name not in fields}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _known(request_id: str) -> str | None:
    return None if request_id == _NO_REQUEST else request_id
