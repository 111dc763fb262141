"""Converts between protobuf messages and our own types, in both directions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

from outrider.api_types.speculation import state_from_proto, state_to_proto
from outrider.errors import RequestError
from outrider.links.gateway_messages import (
    EngineCounters,
    EngineStatus,
    ModelStatus,
    ProcessState,
    ProposerCounters,
    RankStatus,
)
from outrider.proto import control_pb2, generation_pb2
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import AheadCounts, FinishReason
from outrider.text.outputs import Logprob, PositionLogprobs, Speculation

TARGET_ORIGIN = generation_pb2.TOKEN_ORIGIN_TARGET
PROPOSER_ORIGIN = generation_pb2.TOKEN_ORIGIN_PROPOSER
TARGET_NAME = "target"


def origin_name(origin: int, proposer: str) -> str:
    """The origin of a token: "target", or the name of its proposer."""
    return TARGET_NAME if origin == TARGET_ORIGIN else proposer


FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
FINISH_REASON_NAMES = {number: name for name, number in FINISH_REASONS.items()}

STATES = {
    "starting": control_pb2.SERVER_STATE_STARTING,
    "serving": control_pb2.SERVER_STATE_SERVING,
    "engine away": control_pb2.SERVER_STATE_ENGINE_AWAY,
    "draining": control_pb2.SERVER_STATE_DRAINING,
}
STATE_NAMES = {number: name for name, number in STATES.items()}

# -- sampling parameters ----------------------------------------------------------------------

_LISTS = ("bad_words", "stop", "stop_token_ids")
_SPECULATION = ("speculation", "num_speculative_tokens", "fix_depth")  # in a separate message
_SINGLE = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in (*_LISTS, *_SPECULATION, "logit_bias", "allowed_token_ids")
)


def params_from_request(request: generation_pb2.GenerateRequest) -> dict[str, Any]:
    """The sampling parameters that a request gives, by the names of `SamplingParams`."""
    given, control = request.sampling, request.speculation
    values: dict[str, Any] = {
        name: getattr(given, name) for name in _SINGLE if given.HasField(name)
    }
    values |= {name: tuple(found) for name in _LISTS if (found := getattr(given, name))}
    if given.logit_bias:
        values["logit_bias"] = dict(given.logit_bias)
    if given.HasField("allowed_token_ids"):
        values["allowed_token_ids"] = tuple(given.allowed_token_ids.ids)
    if values.get("max_tokens") == 0:
        values["max_tokens"] = None
    if control.method:
        values["speculation"] = control.method
    if control.HasField("depth"):
        values["num_speculative_tokens"] = control.depth
    if control.fix_depth:
        values["fix_depth"] = True
    return values


def put_params(
    request: generation_pb2.GenerateRequest, params: SamplingParams, names: Container[str]
) -> None:
    """Write the named parameters into the request; the others get the server's defaults."""
    given = request.sampling
    values = {name: getattr(params, name) for name in _SINGLE if name in names}
    if "max_tokens" in values:
        values["max_tokens"] = params.max_tokens or 0
    if params.seed is not None:
        values["seed"] = params.seed % 2**64
    for name, value in values.items():
        if value is not None:
            _put(given, name, value)
    for name in _LISTS:
        getattr(given, name).extend(getattr(params, name))
    given.logit_bias.update(params.logit_bias)
    if params.allowed_token_ids is not None:
        given.allowed_token_ids.ids.extend(params.allowed_token_ids)
    request.speculation.method = params.speculation or ""
    if params.num_speculative_tokens is not None:
        request.speculation.depth = params.num_speculative_tokens
    request.speculation.fix_depth = params.fix_depth


def _put(message: Any, name: str, value: Any) -> None:
    try:
        setattr(message, name, value)
    except ValueError:
        raise RequestError(
            f"{name} is {value!r}, which is beyond 32 bits; choose a smaller number."
        ) from None


# -- results ----------------------------------------------------------------------------------


def logprobs_to_proto(
    positions: Iterable[PositionLogprobs | None],
) -> list[generation_pb2.PositionLogprobs]:
    return [
        generation_pb2.PositionLogprobs(
            tokens=[
                generation_pb2.TokenLogprob(
                    token_id=token,
                    logprob=found.logprob,
                    rank=found.rank,
                    text=found.decoded_token,
                )
                for token, found in (position or {}).items()
            ]
        )
        for position in positions
    ]


def logprobs_from_proto(
    positions: Iterable[generation_pb2.PositionLogprobs],
) -> list[PositionLogprobs | None]:
    return [
        {each.token_id: Logprob(each.logprob, each.rank, each.text) for each in position.tokens}
        or None
        for position in positions
    ]


def stats_to_proto(records: Iterable[Speculation]) -> generation_pb2.SpeculationStats:
    """The sum over samples."""
    records = list(records)
    rounds = sum(record.rounds for record in records)
    num_tokens = sum(len(record.drafted_by_token) for record in records)
    return generation_pb2.SpeculationStats(
        rounds=rounds,
        drafted_tokens=sum(record.drafted for record in records),
        accepted_tokens=sum(record.accepted for record in records),
        block_efficiency=num_tokens / rounds if rounds else 0.0,
        verified_at=_summed(record.verified_at for record in records),
        accepted_at=_summed(record.accepted_at for record in records),
    )


def _summed(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in itertools.zip_longest(*rows, fillvalue=0)]


# -- status -----------------------------------------------------------------------------------


def engine_to_proto(status: EngineStatus) -> control_pb2.EngineState:
    return control_pb2.EngineState(
        ranks=[control_pb2.RankState(**dataclasses.asdict(rank)) for rank in status.ranks],
        models=[control_pb2.ModelState(**dataclasses.asdict(model)) for model in status.models],
        speculation=None if status.speculation is None else state_to_proto(status.speculation),
        counters=_counters_to_proto(status.counters),
        **_plain_fields(status, control_pb2.EngineState),
    )


def engine_from_proto(state: control_pb2.EngineState) -> EngineStatus:
    return EngineStatus(
        query=0,
        ranks=tuple(_rank_from_proto(each) for each in state.ranks),
        models=tuple(ModelStatus(**_plain_fields(each, type(each))) for each in state.models),
        speculation=state_from_proto(state.speculation) if state.HasField("speculation") else None,
        counters=_counters_from_proto(state.counters),
        **_plain_fields(state, control_pb2.EngineState),
    )


def _counters_to_proto(counters: EngineCounters) -> control_pb2.EngineCounters:
    given = dataclasses.asdict(counters)
    proposers = [control_pb2.ProposerCounters(**each) for each in given.pop("proposers")]
    ahead = control_pb2.AheadCounts(**given.pop("ahead")._asdict())
    return control_pb2.EngineCounters(proposers=proposers, ahead=ahead, **given)


def _counters_from_proto(message: control_pb2.EngineCounters) -> EngineCounters:
    return EngineCounters(
        rounds_by_drafted=tuple(message.rounds_by_drafted),
        rounds_by_verified=tuple(message.rounds_by_verified),
        rounds_by_accepted=tuple(message.rounds_by_accepted),
        steps_by_tokens=tuple(message.steps_by_tokens),
        proposers=tuple(
            ProposerCounters(**_plain_fields(each, type(each))) for each in message.proposers
        ),
        ahead=AheadCounts(**_plain_fields(message.ahead, control_pb2.AheadCounts)),
        **_plain_fields(message, control_pb2.EngineCounters),
    )


def _rank_from_proto(rank: control_pb2.RankState) -> RankStatus:
    fields = _plain_fields(rank, control_pb2.RankState)
    return RankStatus(**fields | {"state": ProcessState(rank.state)})


def _plain_fields(source: object, message: Any) -> dict[str, Any]:
    """The message's scalar fields, with the values of `source`."""
    fields = message.DESCRIPTOR.fields
    return {
        each.name: getattr(source, each.name)
        for each in fields
        if not each.is_repeated and each.message_type is None
    }
