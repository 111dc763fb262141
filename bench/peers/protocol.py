"""What the benchmark and an engine's process say to each other: one JSON object a line.

First the options, answered by `Hello`; then requests, each answered by a `Generation`. Imports
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
    """How drafts are made. `depth` drafts a round; an engine's own default where it is None."""

    method: str = "off"  # "off", "draft" or "ngram"
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The checkpoints and limits all engines are started with."""

    target: str
    draft: str
    tokenizer: str
    threads: int
    max_model_len: int
    dtype: str = "auto"  # of an engine that can keep weights as they are stored
    mode: Mode = field(default_factory=Mode)  # engines that fix it at start look here
    executable: str | None = None  # of an engine that is a program of its own
    search: bool = False  # engines that can try settings of their own keep the fastest


@dataclass(frozen=True, slots=True)
class Request:
    prompts: list[Tokens]
    max_tokens: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Hello:
    """An engine is ready; `versions` are those of the packages that matter to it, `settings` what
    was chosen for it beyond the options that all engines share."""

    versions: dict[str, str]
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """Texts and how they came about; counts are summed over the prompts.

    `rounds` are passes that committed tokens, the prompt's included; 0 if an engine does not tell.
    """

    token_ids: list[Tokens]
    seconds: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Engine(Protocol):
    """What runs in a peer's process. Greedy, end-of-text ignored, nothing cached between calls."""

    @property
    def versions(self) -> dict[str, str]: ...

    @property
    def settings(self) -> dict[str, str]: ...

    def generate(self, prompts: Sequence[Tokens], max_tokens: int, mode: Mode) -> Generation: ...


def encode(message: Options | Request | Hello | Generation) -> str:
    return json.dumps(dataclasses.asdict(message))


def decode_options(line: str) -> Options:
    return Options(**_with_mode(json.loads(line)))


def decode_request(line: str) -> Request:
    return Request(**_with_mode(json.loads(line)))


def decode_hello(line: str) -> Hello:
    return Hello(**json.loads(line))


def decode_generation(line: str) -> Generation:
    return Generation(**json.loads(line))


def _with_mode(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "mode": Mode(**fields["mode"])}
