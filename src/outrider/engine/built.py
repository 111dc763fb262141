"""A running engine, however it was built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.engine.step import StepLoop
from outrider.links.gateway_messages import EngineFacts, EngineStatus
from outrider.text.tokenizer import Tokenizer
from outrider.workers.models.spec import ModelSpec


def _nothing() -> None:
    """Models of this process end with it, and it has no ranks to tell about."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of an engine and what was found out while building it."""

    config: EngineConfig
    loop: StepLoop
    tokenizer: Tokenizer | None
    target: ModelSpec
    draft: ModelSpec | None
    facts: EngineFacts
    close: Callable[[], None] = _nothing  # ends what was started for it
    status: Callable[[], EngineStatus | None] = _nothing  # of its ranks, if they are processes
