"""Callbacks for a server's events, and the sentences it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from outrider.cluster.events import Say
from outrider.config import EngineConfig
from outrider.links.gateway_messages import EngineFacts
from outrider.links.speculation import SpeculationStatus
from outrider.text.defaults import sampling_defaults


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of a server; `http` and `grpc` are empty without local gateways."""

    http: str
    grpc: str
    admin: str | None = None


OnReady: TypeAlias = Callable[[Addresses, SpeculationStatus | None, EngineConfig], None]
"""Called with the addresses, the engine's speculation status if known, and its settled
configuration."""


@dataclass(frozen=True, slots=True)
class ServeCallbacks:
    """Called for every event, and once the server is ready."""

    say: Say
    on_ready: OnReady


def listening_sentence(addresses: Addresses, tls_cert: str | None = None) -> str:
    """The address of each protocol, in words."""
    scheme = "http" if tls_cert is None else "https"
    parts = []
    if addresses.http:
        parts.append(f"on {scheme}://{addresses.http} and, for gRPC, on {addresses.grpc}")
    if addresses.admin is not None:
        parts.append(f"for probes on http://{addresses.admin}")
    return f"listening {'; '.join(parts)}" if parts else ""


def kv_sentence(facts: EngineFacts, block_size: int) -> str:
    """The KV capacity of target and draft, in tokens."""
    text = f"KV: {facts.num_blocks} blocks, room for {facts.num_blocks * block_size} tokens"
    if facts.num_draft_blocks:
        text += f"; the draft's for {facts.num_draft_blocks * block_size}"
    return text


def defaults_sentence(facts: EngineFacts, generation_config: str) -> str:
    """The checkpoint's sampling defaults in words; empty if requests get none."""
    defaults = sampling_defaults(facts, generation_config)
    if not defaults:
        return ""
    shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return (
        f"requests that leave them out get the checkpoint's defaults: {shown} "
        "(--generation-config none turns them off)"
    )
