"""The user's cache folder, and folders that appear in it whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ABANDONED_S = 6 * 3600.0


def cache_folder() -> Path:
    """`OUTRIDER_CACHE`, or `~/.cache/outrider`."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "outrider"


def build_folder(final: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder, then put it in the place of `final` in one step.

    Of several processes that build the same folder at once, one wins and the others' is dropped.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        build(scratch)
        try:
            os.replace(scratch, final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(final: Path) -> None:
    """Remove what killed builders of the same folder left behind."""
    for leftover in final.parent.glob(f".{final.name}.*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(leftover)


def discard_folder(folder: Path) -> None:
    """Remove a folder so that nobody ever sees half of it."""
    doomed = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        os.replace(folder, doomed / "old")
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(doomed, ignore_errors=True)
