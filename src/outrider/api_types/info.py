"""A client's view of a server and its model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.proto import control_pb2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model; see `GetModelInfoResponse` of the protocol."""

    names: tuple[str, ...]
    checkpoint: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, Any]  # by the names of `SamplingParams`

    @classmethod
    def from_proto(cls, response: control_pb2.GetModelInfoResponse) -> ModelInfo:
        return cls(
            names=tuple(response.names),
            checkpoint=response.checkpoint,
            max_model_len=response.max_model_len,
            vocab_size=response.vocab_size,
            has_chat_template=response.has_chat_template,
            eos_token_ids=tuple(response.eos_token_ids),
            sampling_defaults=json.loads(response.sampling_defaults_json or "{}"),
        )


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server; see `GetServerInfoResponse` of the protocol."""

    version: str
    processes: int
    needs_key: bool
    max_body_bytes: int
    max_requests: int
    max_samples: int
    max_logprobs: int
    resume_window_s: float

    @classmethod
    def from_proto(cls, response: control_pb2.GetServerInfoResponse) -> ServerInfo:
        names = control_pb2.GetServerInfoResponse.DESCRIPTOR.fields_by_name
        return cls(**{name: getattr(response, name) for name in names})
