"""Clients of a server.

    with Client("localhost:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)

Parameters are those of `SamplingParams`. A server's refusal is raised as the engine's own error,
with its message. A request resumes if its connection is lost. Needs no torch.
"""

from __future__ import annotations

from outrider.api_types.errors import (
    DeadlineError,
    RequestCancelledError,
    RequestIdInUseError,
    UnavailableError,
    UnknownModelError,
)
from outrider.api_types.info import ModelInfo, ServerInfo
from outrider.api_types.results import Chunk, Completion, ReplicaStatus, Sample, ServerStatus
from outrider.api_types.speculation import SpeculationAccount
from outrider.client.access import CHANNEL_OPTIONS, DEFAULT_SERVER
from outrider.client.aio import AsyncClient, AsyncStream
from outrider.client.requests import chat_request, prompt_request
from outrider.client.sync import Client, Stream
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
