"""The servers that can be measured, by the scheme of their address."""

from outrider.bench.load.targets.base import Reply, Target, TargetFault, TargetSpec
from outrider.bench.load.targets.registry import make_target

__all__ = ["Reply", "Target", "TargetFault", "TargetSpec", "make_target"]
