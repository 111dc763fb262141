"""The settings that a server changes in the replicas it adopts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.cluster.operations import changed
from outrider.config import EngineConfig

_REPLICAS = "cluster.replicas"
# Settings of gateways, logging and the connection to Ray do not concern running replicas.
_NOT_OF_REPLICAS = ("server.", "log_", "cluster.address", "cluster.listen", "cluster.ray_timeout_s")


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference between the settings replicas run with and those of the adopting server."""

    settings: Mapping[str, Any]  # to be rolled out
    num_replicas: int | None  # to scale to

    @property
    def what(self) -> str:
        """The changes in words; empty if there are none."""
        parts = []
        if self.num_replicas is not None:
            parts.append(f"scale to {self.num_replicas}")
        if self.settings:
            shown = ", ".join(f"{path}={value}" for path, value in self.settings.items())
            parts.append(f"roll out {shown}")
        return ", ".join(parts)

    @property
    def is_draft_only(self) -> bool:
        return all(path.startswith("draft.") for path in self.settings)


def changes_between(current: EngineConfig, target: EngineConfig) -> Changes:
    """Raises `ConfigError` if a rollout cannot lead from the current settings to the target."""
    old, new = current.to_settings(), target.to_settings()
    differing = {
        path: value
        for path, value in new.items()
        if value != old.get(path) and not path.startswith(_NOT_OF_REPLICAS)
    }
    num_replicas = differing.pop(_REPLICAS, None)
    changed(current, differing)
    return Changes(differing, num_replicas)
