"""Outrider: speculative decoding that never changes the text.

`LLM` and `SamplingParams` are the public API, `AsyncEngine` and `EngineConfig` for programs that
stream, `outrider.client` for clients of a server. All are imported on first use, so that
`import outrider` is cheap and needs no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client import AsyncClient, Client
    from outrider.config import EngineConfig
    from outrider.engine.async_engine import AsyncEngine
    from outrider.engine.llm import LLM
    from outrider.errors import OutriderError
    from outrider.scheduler.params import SamplingParams
    from outrider.text.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

# gRPC reads it on import. It would log every failed handshake, so any client could fill the log.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

_HOMES = {
    "LLM": "outrider.engine.llm",
    "AsyncEngine": "outrider.engine.async_engine",
    "AsyncClient": "outrider.client",
    "Client": "outrider.client",
    "EngineConfig": "outrider.config",
    "RequestOutput": "outrider.text.outputs",
    "CompletionOutput": "outrider.text.outputs",
    "SamplingParams": "outrider.scheduler.params",
    "OutriderError": "outrider.errors",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncEngine",
    "Client",
    "CompletionOutput",
    "EngineConfig",
    "OutriderError",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
