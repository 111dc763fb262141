"""What goes wrong between the processes of a cluster."""

from __future__ import annotations

from outrider.errors import CapacityError, OutriderError


class ClusterError(OutriderError):
    """A server could not be started, or cannot be kept running."""


class PlacementError(CapacityError):
    """The cluster has no room for a model."""
