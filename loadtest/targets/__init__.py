"""Targets: protocol clients, chosen by the scheme of a server's address."""

from outrider.loadtest.targets.base import Reply, Target, TargetFault, TargetSpec
from outrider.loadtest.targets.registry import make_target

__all__ = ["Reply", "Target", "TargetFault", "TargetSpec", "make_target"]
