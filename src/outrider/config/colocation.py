"""Whether a server's engine is colocated with its models. Decided here and nowhere else."""

from __future__ import annotations

import dataclasses

from outrider.config import EngineConfig


def settle_colocation(config: EngineConfig, num_gpus: int) -> EngineConfig:
    """The configuration with `cluster.colocate` decided, for a server with `num_gpus` GPUs.

    With one GPU a draft in another process would share it with the target anyway.
    """
    if config.cluster.colocate is not None:
        return config
    colocate = num_gpus == 1 and _is_fit(config)
    return dataclasses.replace(
        config, cluster=dataclasses.replace(config.cluster, colocate=colocate)
    )


def _is_fit(config: EngineConfig) -> bool:
    """Whether one process on a GPU can hold the configured models."""
    target, draft = config.target, config.draft
    return (
        not config.has_processes
        and target.device != "cpu"
        and draft.device in ("auto", target.device)
        and draft.dtype in ("auto", target.dtype)
    )
