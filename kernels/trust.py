"""Which files may be loaded as code: those of this user or root that no other user can write to."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def distrust(found: os.stat_result) -> str | None:
    """The reason not to load code from this file, or None."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return f"others can write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def trusted_folder(folder: Path, name: str) -> Path:
    """`folder`, created if missing; if other users could write code there, a private one in the
    temporary folder. Raises `OSError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o755, exist_ok=True)
    reason = _distrust_folder(folder)
    if reason is None:
        return folder
    private = _private_folder(name)
    logger.warning("code in %s is not loaded because %s; using %s", folder, reason, private)
    return private


def _distrust_folder(folder: Path) -> str | None:
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
        found = folder.stat()
    reason = distrust(found)
    above = folder.parent.stat()
    if reason is None and above.st_uid not in (os.geteuid(), 0):
        reason = f"{folder.parent} belongs to user {above.st_uid}"
    is_open = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    return f"any user can write to {folder.parent}" if reason is None and is_open else reason


def _private_folder(name: str) -> Path:
    """The same for every process of this user, unless another user owns it."""
    private = Path(tempfile.gettempdir(), f"outrider-{name}-{os.geteuid()}")
    private.mkdir(mode=0o700, exist_ok=True)
    if stat.S_ISDIR(private.lstat().st_mode) and distrust(private.lstat()) is None:
        return private
    return Path(tempfile.mkdtemp(prefix=f"outrider-{name}-"))
