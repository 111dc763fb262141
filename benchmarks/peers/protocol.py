"""The protocol between the benchmark and an engine's process: one JSON object a line.

First the options, answered by `PeerInfo`; then requests, each answered by a `Generation`. Imports
nothing but the standard library, because it also runs in the other engines' environments.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.errors import OutriderError

Tokens = list[int]


class PeerError(OutriderError):
    """An engine's process did not start, failed or died."""


@dataclass(frozen=True, slots=True)
class Mode:
    """The draft method. `depth` is draft tokens per round; None is the engine's default."""

    method: str = "off"  # "off", "draft" or "ngram"
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The checkpoints and limits that all engines start with."""

    target: str
    draft: str
    tokenizer: str
    threads: int
    max_model_len: int
    dtype: str = "auto"  # of engines that can run on stored (quantized) weights
    mode: Mode = field(default_factory=Mode)  # for engines that fix it at start
    executable: str | None = None  # of an engine that is a separate program
    search: bool = False  # engines with tunable settings search for the fastest


@dataclass(frozen=True, slots=True)
class PeerRequest:
    prompts: list[Tokens]
    max_tokens: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Sent when an engine is ready: the versions of its packages, and its settings beyond the
    shared options."""

    versions: dict[str, str]
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """Output tokens and timing; counts are summed over the prompts.

    `rounds` are passes that committed tokens, prefill included; 0 if the engine does not report it.
    """

    token_ids: list[Tokens]
    seconds: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


class PeerEngine(Protocol):
    """An engine in a peer's process. Greedy, end-of-text ignored, no cache between calls."""

    @property
    def versions(self) -> dict[str, str]: ...

    @property
    def settings(self) -> dict[str, str]: ...

    def generate(self, prompts: Sequence[Tokens], max_tokens: int, mode: Mode) -> Generation: ...


def encode(message: Options | PeerRequest | PeerInfo | Generation) -> str:
    return json.dumps(dataclasses.asdict(message))


def decode_options(line: str) -> Options:
    return Options(**_with_mode(json.loads(line)))


def decode_request(line: str) -> PeerRequest:
    return PeerRequest(**_with_mode(json.loads(line)))


def decode_info(line: str) -> PeerInfo:
    return PeerInfo(**json.loads(line))


def decode_generation(line: str) -> Generation:
    return Generation(**json.loads(line))


def _with_mode(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "mode": Mode(**fields["mode"])}
