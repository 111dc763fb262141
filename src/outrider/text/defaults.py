"""Default sampling parameters: one rule for HTTP, gRPC, the page, the commands and `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.links.gateway_messages import EngineFacts
from outrider.scheduler.params import SamplingParams


def sampling_defaults(facts: EngineFacts, generation_config: str) -> dict[str, Any]:
    """The checkpoint's defaults, by the names of `SamplingParams`; none if
    `server.generation_config` turns them off."""
    return dict(facts.sampling_defaults) if generation_config == "auto" else {}


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """`given` over the checkpoint's defaults over OpenAI's, which are those of
    `SamplingParams`."""
    return SamplingParams.from_mapping({**defaults, **given})
