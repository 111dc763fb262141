"""Environment variables that a process on another host needs to find the same models."""

from __future__ import annotations

import os

_VARIABLES = (
    *("HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"),
    "OUTRIDER_CACHE",
)


def model_environment() -> dict[str, str]:
    """Variables of this process that say where models are downloaded from and cached. Children on
    this host inherit them."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}
