"""Errors of the kernels, for processes that have no tensors too."""

from __future__ import annotations


class KernelUnavailableError(RuntimeError):
    """The kernels that were asked for by name cannot run here."""
