"""What a server that adopts running replicas has them change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.cluster.orders import changed
from outrider.config import EngineConfig

_REPLICAS = "cluster.replicas"
# Of gateways, logs and how a server finds Ray: replicas that run are no others for them.
_NOT_OF_REPLICAS = ("server.", "log_", "cluster.address", "cluster.listen", "cluster.ray_timeout_s")


@dataclass(frozen=True, slots=True)
class Changes:
    """Between the settings that replicas were started with and those of the adopting server."""

    settings: Mapping[str, Any]  # to be rolled out
    num_replicas: int | None  # to scale to

    @property
    def what(self) -> str:
        """In words; empty if there are none."""
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


def changes_between(given: EngineConfig, wanted: EngineConfig) -> Changes:
    """`ConfigError` if replicas with these settings cannot take the place of those that run."""
    old, new = given.to_settings(), wanted.to_settings()
    differing = {
        path: value
        for path, value in new.items()
        if value != old.get(path) and not path.startswith(_NOT_OF_REPLICAS)
    }
    num_replicas = differing.pop(_REPLICAS, None)
    changed(given, differing)
    return Changes(differing, num_replicas)
