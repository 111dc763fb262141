"""Checks that a draft fits its target, in a Ray task: it needs torch, which the controller
avoids."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import ray
from outrider.checkpoints.environment import model_environment
from outrider.cluster.errors import ClusterError
from outrider.cluster.ray.facts import own_node_id
from outrider.config import EngineConfig
from outrider.errors import OutriderError
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


async def check_draft(config: EngineConfig) -> None:
    """The checks of a start: files, split, vocabulary and tokenizer. Raises the first failure."""
    limit_s = config.cluster.start_timeout_s
    here = NodeAffinitySchedulingStrategy(own_node_id(), soft=True)
    check: Any = ray.remote(_check)
    call = check.options(num_cpus=0, max_retries=0, scheduling_strategy=here)
    try:
        async with asyncio.timeout(limit_s):
            await call.remote(config, model_environment())
    except RayTaskError as error:
        if isinstance(error.cause, OutriderError):
            raise error.cause from None
        raise ClusterError(f"the draft could not be checked: {error}") from error
    except RayError as error:
        raise ClusterError(f"the draft could not be checked: {error}") from error
    except TimeoutError:
        raise ClusterError(
            f"the draft could not be checked within cluster.start_timeout_s ({limit_s:g} s)."
        ) from None


def _check(config: EngineConfig, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    from outrider.engine.preflight import check_models

    check_models(config)
