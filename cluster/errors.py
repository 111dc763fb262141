"""Errors of the processes of a cluster."""

from __future__ import annotations

from outrider.errors import CapacityError, OutriderError


class ClusterError(OutriderError):
    """A server could not be started, or cannot be kept running."""


class PlacementError(CapacityError):
    """The cluster lacks resources for a model."""


class DetachedError(ClusterError):
    """Ray, or the controller in it, no longer answers; the server may attach again."""
