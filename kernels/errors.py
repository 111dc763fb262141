"""Errors of the kernels, importable without torch."""

from __future__ import annotations


class KernelUnavailableError(RuntimeError):
    """The requested kernels cannot run here."""
