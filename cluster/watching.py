"""Who is told how a server fares, and in which words."""

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
    """Where clients reach a server; those of clients are empty where it has no gateways."""

    http: str
    grpc: str
    admin: str | None = None


OnReady: TypeAlias = Callable[[Addresses, SpeculationStatus | None, EngineConfig], None]
"""The addresses, how far the engine there means to draft, if it has said, and the configuration as
it has settled it."""


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who is told how a server fares."""

    say: Say
    on_ready: OnReady


def listening_sentence(addresses: Addresses, tls_cert: str | None = None) -> str:
    """The address of each protocol."""
    scheme = "http" if tls_cert is None else "https"
    said = []
    if addresses.http:
        said.append(f"on {scheme}://{addresses.http} and, for gRPC, on {addresses.grpc}")
    if addresses.admin is not None:
        said.append(f"for probes on http://{addresses.admin}")
    return f"listening {'; '.join(said)}" if said else ""


def kv_sentence(facts: EngineFacts, block_size: int) -> str:
    """How many tokens the target's KV has room for, and the draft's."""
    said = f"KV: {facts.num_blocks} blocks, room for {facts.num_blocks * block_size} tokens"
    if facts.num_draft_blocks:
        said += f"; the draft's for {facts.num_draft_blocks * block_size}"
    return said


def defaults_sentence(facts: EngineFacts, generation_config: str) -> str:
    """The checkpoint's sampling defaults; empty where requests get none of it."""
    defaults = sampling_defaults(facts, generation_config)
    if not defaults:
        return ""
    shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return (
        f"requests that leave them out get the checkpoint's defaults: {shown} "
        "(--generation-config none turns them off)"
    )
