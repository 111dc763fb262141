"""Files that are reloaded when they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.errors import ConfigError

logger = logging.getLogger(__name__)

POLL_S = 1.0
_Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Calls `load` now and whenever one of the files has changed.

    The first load raises its errors. Later errors are logged once, and the last good load stays.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], None]) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self._stamp = self._current_stamp()  # before loading: a change in between is seen next time
        load()

    def refresh(self) -> None:
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._load()
        except ConfigError as error:
            logger.error("%s stay as they were: %s", self._what, error)
        else:
            logger.info("%s were reloaded", self._what)

    def _current_stamp(self) -> _Stamp:
        return tuple(_stamp_of(path) for path in self._paths)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def poll_files(watched: Sequence[WatchedFiles]) -> None:
    """Poll the files until cancelled."""
    while watched:
        await asyncio.sleep(POLL_S)
        for each in watched:
            try:
                await asyncio.to_thread(each.refresh)
            except Exception:
                logger.exception("a file could not be checked")
