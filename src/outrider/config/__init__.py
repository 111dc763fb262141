"""What can be set: the settings themselves, their rules, and where their values come from."""

from outrider.config.schema import (
    MAX_SPECULATIVE_TOKENS,
    SECTIONS,
    CacheConfig,
    ClusterConfig,
    DraftConfig,
    EngineConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculationConfig,
    TargetConfig,
    find_setting,
    settings,
)

__all__ = [
    "MAX_SPECULATIVE_TOKENS",
    "SECTIONS",
    "CacheConfig",
    "ClusterConfig",
    "DraftConfig",
    "EngineConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculationConfig",
    "TargetConfig",
    "find_setting",
    "settings",
]
