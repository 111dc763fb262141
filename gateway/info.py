"""What does not change while a server runs: its model, limits and sampling defaults."""

from __future__ import annotations

import json

from outrider import __version__
from outrider.api_types.errors import UnavailableError
from outrider.gateway.gateway import Gateway
from outrider.proto import control_pb2


def model_info(gateway: Gateway) -> control_pb2.GetModelInfoResponse:
    facts = gateway.facts
    if facts is None:
        raise UnavailableError("the engine is starting; try again in a moment.")
    return control_pb2.GetModelInfoResponse(
        names=gateway.models,
        checkpoint=str(facts.settings["target.model"]),
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        has_chat_template=gateway.has_chat_template,
        eos_token_ids=facts.eos_ids,
        sampling_defaults_json=json.dumps(gateway.sampling_defaults),
    )


def server_info(gateway: Gateway) -> control_pb2.GetServerInfoResponse:
    config = gateway.config
    return control_pb2.GetServerInfoResponse(
        version=__version__,
        processes=config.processes,
        needs_key=gateway.callers.needs_key,
        max_body_bytes=config.max_body_bytes,
        max_requests=config.max_requests,
        max_samples=config.max_samples,
        max_logprobs=config.max_logprobs,
        resume_window_s=config.resume_window_s,
    )
