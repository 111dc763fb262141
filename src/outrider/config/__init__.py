"""Configuration: the settings, their rules, and the sources of their values."""

from outrider.config.schema import SECTIONS, EngineConfig, find_setting, settings
from outrider.config.sections import (
    MAX_SPECULATIVE_TOKENS,
    CacheConfig,
    ClusterConfig,
    DraftConfig,
    HeadConfig,
    SchedulerConfig,
    SpeculationConfig,
    TargetConfig,
)
from outrider.config.serving import ServerConfig

__all__ = [
    "MAX_SPECULATIVE_TOKENS",
    "SECTIONS",
    "CacheConfig",
    "ClusterConfig",
    "DraftConfig",
    "HeadConfig",
    "EngineConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculationConfig",
    "TargetConfig",
    "find_setting",
    "settings",
]
