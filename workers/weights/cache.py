"""The user's cache folder, and folders that appear in it whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """`OUTRIDER_CACHE`, or `~/.cache/outrider`."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "outrider"


def build_folder(final: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder, then put it in the place of `final` in one step.

    Of several processes that build the same folder at once, one wins and the others' is dropped.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
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


def discard_folder(folder: Path) -> None:
    """Remove a folder so that nobody ever sees half of it."""
    doomed = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        os.replace(folder, doomed / "old")
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(doomed, ignore_errors=True)
