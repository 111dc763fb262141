"""Parameters, results and status, to protobuf and back."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.api_types.convert import (
    engine_from_proto,
    engine_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    params_from_request,
    put_params,
    stats_to_proto,
)
from outrider.api_types.speculation import (
    account_from_proto,
    account_to_proto,
    change_from_proto,
    change_to_proto,
)
from outrider.errors import RequestError
from outrider.links.gateway_messages import (
    EngineCounters,
    EngineStatus,
    ExplainSpeculationResult,
    ModelStatus,
    ProcessState,
    ProposerCounters,
    RankStatus,
)
from outrider.links.speculation import (
    CandidateAccount,
    SpeculationChange,
    SpeculationSettings,
    SpeculationStatus,
    StepAccount,
)
from outrider.proto import generation_pb2
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import AheadCounts
from outrider.text.outputs import Logprob, Speculation

_EVERY = {field.name for field in dataclasses.fields(SamplingParams)}


def _round_trip(params: SamplingParams) -> SamplingParams:
    request = generation_pb2.GenerateRequest()
    put_params(request, params, _EVERY)
    sent = generation_pb2.GenerateRequest.FromString(request.SerializeToString())
    return SamplingParams.from_mapping(params_from_request(sent))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, seed=0, max_tokens=1, logprobs=0),
        SamplingParams(max_tokens=None, min_tokens=3, n=128),
        SamplingParams(top_p=0.9, min_p=1e-9, presence_penalty=-2.0, repetition_penalty=0.1),
        SamplingParams(logit_bias={0: -100.0, 49151: 0.1}, allowed_token_ids=[0]),
        SamplingParams(stop="a", bad_words=["b", "c"], stop_token_ids=[0, 1]),
        SamplingParams(ignore_eos=True, echo=True, skip_special_tokens=False),
        SamplingParams(include_stop_str_in_output=True, prompt_logprobs=50, seed=2**64 - 1),
        *(SamplingParams(speculation=method) for method in ("draft", "ngram", "off")),
        SamplingParams(num_speculative_tokens=0),
        SamplingParams(num_speculative_tokens=3, fix_depth=True),
    ],
)
def test_parameters_survive_the_wire_exactly(params: SamplingParams) -> None:
    assert _round_trip(params) == params


def test_a_negative_seed_arrives_as_the_seed_the_engine_makes_of_it() -> None:
    assert _round_trip(SamplingParams(seed=-1)).seed == 2**64 - 1


def test_what_was_not_named_is_left_out_of_the_message() -> None:
    request = generation_pb2.GenerateRequest()
    put_params(request, SamplingParams(), ())
    assert request.sampling.ListFields() == request.speculation.ListFields() == []


def test_a_default_that_was_named_is_part_of_the_message() -> None:
    request = generation_pb2.GenerateRequest()
    put_params(request, SamplingParams(max_tokens=16, temperature=1.0), ("max_tokens",))
    assert params_from_request(request) == {"max_tokens": 16}


def test_a_request_without_parameters_has_none() -> None:
    assert params_from_request(generation_pb2.GenerateRequest()) == {}


def test_a_number_too_large_for_the_wire_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"^top_k is 4294967296, which is beyond 32 bits"):
        _round_trip(SamplingParams(top_k=2**32))


def test_logprobs_survive_in_order() -> None:
    positions = [None, {7: Logprob(-0.5, 1, "a"), 3: Logprob(-9.25, 812, "\ufffd")}]
    back = logprobs_from_proto(logprobs_to_proto(positions))
    assert back == positions
    assert list(back[1] or ()) == [7, 3]


def test_statistics_are_summed_over_samples() -> None:
    records = [Speculation(2, 6, 3, [True] * 3 + [False] * 2), Speculation(3, 9, 1, [False] * 4)]
    stats = stats_to_proto(records)
    assert (stats.rounds, stats.drafted_tokens, stats.accepted_tokens) == (5, 15, 4)
    assert stats.block_efficiency == 9 / 5


def test_an_engines_status_survives() -> None:
    ranks = (RankStatus("draft", 1, 4_000_000, "far", "cuda:1", ProcessState.LOST),)
    models = (ModelStatus("target", 4_000_001, "near", "cuda"),)
    settings = SpeculationSettings("goodput", 0, "fixed", None, 5, True)
    speculation = SpeculationStatus(
        settings, 2.5, 0.75, 0.5, None, 1.25, None, 3.0, 0.0, 2**40, "it does not pay"
    )
    proposers = (ProposerCounters("draft", 9, 4), ProposerCounters("ngram", 2**40, 0))
    counters = EngineCounters(
        *(2**40, 2, 3, (1, 2), (3,), (), 0.5, 0.25, 0.125, 1.5, proposers, 4, 5, 2**41, (6, 7)),
        ahead=AheadCounts(2**40, 8, 7, 6),
    )
    status = EngineStatus(
        *(0, ranks, "nccl", 2**40, 3, 4, 5, 6, 7, 2**50, 9, 10, 11, 12),
        *(models, speculation, counters),
    )
    assert engine_from_proto(engine_to_proto(status)) == status
    without = dataclasses.replace(status, speculation=None)
    assert engine_from_proto(engine_to_proto(without)) == without


@pytest.mark.parametrize(
    "change",
    [
        SpeculationChange(),
        SpeculationChange("off"),
        SpeculationChange(None, True, 0),
        SpeculationChange("fixed", True, 4),
        SpeculationChange("fixed", True, None),
    ],
)
def test_a_change_of_speculation_survives(change: SpeculationChange) -> None:
    assert change_from_proto(change_to_proto(change)) == change


def test_explained_steps_survive() -> None:
    plain = CandidateAccount(0, 0, 0, 2.0, 0.0, 0.001)
    best = CandidateAccount(3, 6, 5, 5.5, 0.0005, 0.002)
    weighed = StepAccount(
        8, "goodput", 2, 1, 16, 2, 6, 0, (plain, best), best, "It pays.", 0, 0.1, 0.2
    )
    waiting = StepAccount(9, "fixed", 2, 0, 0, 0, 0, 3, (), None, "", None, 0.0, 0.0)
    found = ExplainSpeculationResult(4, (weighed, waiting), 256, (0.25, 0.125))
    account = account_from_proto(account_to_proto(found))
    assert account.steps == found.steps
    assert (account.num_remembered, account.calibration) == (256, (0.25, 0.125))
    assert account.calibration_error == 0.1875
