"""The code that a result was measured with."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The checkout's commit, marked if the tree is dirty; None outside of a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
