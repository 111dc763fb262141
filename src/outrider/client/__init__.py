"""Talking to a server.

    with Client("localhost:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)

Parameters are those of `SamplingParams`. What a server refuses is raised as the error the engine
itself would raise, with its sentence. A request goes on where it was if its connection is lost.
Needs no torch.
"""

from __future__ import annotations

from outrider.client.access import CHANNEL_OPTIONS, DEFAULT_SERVER
from outrider.client.aio import AsyncClient, AsyncStream
from outrider.client.requests import chat_request, prompt_request
from outrider.client.sync import Client, Stream
from outrider.gateway.errors import (
    DeadlineError,
    RequestCancelledError,
    RequestIdInUseError,
    UnavailableError,
    UnknownModelError,
)
from outrider.gateway.info_results import ModelInfo, ServerInfo
from outrider.gateway.results import Chunk, Completion, ReplicaStatus, Sample, ServerStatus
from outrider.gateway.speculation import SpeculationAccount
from outrider.links.speculation import SpeculationSettings

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "CHANNEL_OPTIONS",
    "Chunk",
    "Client",
    "Completion",
    "DEFAULT_SERVER",
    "DeadlineError",
    "ModelInfo",
    "ReplicaStatus",
    "RequestCancelledError",
    "RequestIdInUseError",
    "Sample",
    "ServerInfo",
    "ServerStatus",
    "SpeculationAccount",
    "SpeculationSettings",
    "Stream",
    "UnavailableError",
    "UnknownModelError",
    "chat_request",
    "prompt_request",
]
