"""What goes wrong between the processes of a cluster."""

from __future__ import annotations

from outrider.errors import CapacityError, OutriderError


class ClusterError(OutriderError):
    """A server could not be started, or cannot be kept running."""


class PlacementError(CapacityError):
    """The cluster has no room for a model."""


class DetachedError(ClusterError):
    """Ray, or the controller in it, no longer answers; a server may attach to it anew."""
