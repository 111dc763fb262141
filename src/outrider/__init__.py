"""Outrider: speculative decoding that never changes the text.

`LLM` and `SamplingParams` are the public API; they are imported when first used, so that
`import outrider` costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.async_engine import AsyncEngine
    from outrider.engine.llm import LLM
    from outrider.errors import OutriderError
    from outrider.scheduler.params import SamplingParams
    from outrider.text.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "LLM": "outrider.engine.llm",
    "AsyncEngine": "outrider.engine.async_engine",
    "RequestOutput": "outrider.text.outputs",
    "CompletionOutput": "outrider.text.outputs",
    "SamplingParams": "outrider.scheduler.params",
    "OutriderError": "outrider.errors",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "OutriderError",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
