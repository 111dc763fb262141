"""What a server tells Prometheus of requests that are known, and of its engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fake_engine import MODEL, FakeService, fake_service
from metrics_tools import Page, get, read_page
from waits import wait_until

from outrider.client import Client
from outrider.errors import CapacityError, OutriderError, RequestError
from outrider.gateway.metrics import page as metrics_page
from outrider.gateway.metrics.names import METRICS, VLLM_LABELS
from outrider.links.gateway_messages import EngineCounters, ProposerCounters, SubmitRefused
from outrider.loadtest.runs import ServerSample
from outrider.loadtest.servers.counters import put_metrics
from outrider.scheduler.types import STEP_TOKENS

COUNTERS = EngineCounters(
    prompt_tokens=50,
    cached_tokens=20,
    verified_tokens=38,
    rounds_by_drafted=(3, 0, 5, 10),
    rounds_by_verified=(3, 0, 7, 8),
    rounds_by_accepted=(5, 4, 7, 4),
    draft_s=1.5,
    verify_s=4.0,
    transfer_s=0.25,
    wait_s=0.5,
    proposers=(ProposerCounters("draft", 30, 24), ProposerCounters("ngram", 8, 6)),
    step_tokens=70,
    steps_by_tokens=(2, 5, 3, *([0] * (len(STEP_TOKENS) - 2))),
)


@pytest.fixture(autouse=True)
def _asked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "KEEP_S", 0.0)


def page_of(service: FakeService) -> Page:
    return read_page(service.server.http_address)


def settled(service: FakeService) -> Page:
    """Once no request is in hand."""
    wait_until(lambda: page_of(service)["outrider:active_requests"] == 0)
    return page_of(service)


def test_requests_of_known_size_are_counted_as_they_were(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        for max_tokens, num_prompt in ((10, 3), (20, 5), (30, 7)):
            service.client.generate(list(range(10, 10 + num_prompt)), max_tokens=max_tokens)
        for _ in range(2):
            stream = service.client.stream([10, 11], max_tokens=400)
            with stream:
                next(iter(stream))  # then it is closed, and so cancelled
        with pytest.raises(RequestError):
            service.client.generate([10], model="nobody", max_tokens=3)
        with pytest.raises(RequestError):
            service.client.generate([10] * 600, max_tokens=3)
        page = settled(service)
        told = service.engine.tokens_told
    assert page.by("outrider:request_success_total", "reason") == {"length": 3, "abort": 2}
    assert page.by("outrider:refused_requests_total", "reason") == {
        "unknown_model": 1,
        "invalid": 1,
    }
    assert page["outrider:prompt_tokens_total"] == 3 + 5 + 7 + 2 * 2
    assert page["outrider:request_prompt_tokens_sum"] == 19
    assert page["outrider:request_prompt_tokens_count"] == 5
    generated = page["outrider:generation_tokens_total"]
    assert 60 + 2 <= generated <= told, "and what was read of the two that were cancelled"
    assert page["outrider:request_generation_tokens_sum"] == generated
    assert page["outrider:time_to_first_token_seconds_count"] == 5
    assert page["outrider:e2e_request_latency_seconds_count"] == 5
    assert page["outrider:request_queue_time_seconds_count"] == 5
    assert page["outrider:gateway_processes"] == 1
    assert set(page.by("outrider:generation_tokens_total", "model")) == {MODEL}


def test_tokens_that_come_together_share_the_time_since_the_last(tmp_path: Path) -> None:
    with fake_service(tmp_path, step_s=0.02) as service:
        start_s = time.monotonic()
        chunks = list(service.client.stream([10, 11, 12], max_tokens=12))
        took_s = time.monotonic() - start_s
        page = settled(service)
    num_later = 12 - len(chunks[0].token_ids)
    assert page["outrider:inter_token_latency_seconds_count"] == num_later > 0
    spent_s = page["outrider:inter_token_latency_seconds_sum"]
    assert 0 < spent_s < took_s
    mean_s = page["outrider:request_time_per_output_token_seconds_sum"]
    assert mean_s == pytest.approx(spent_s / 11, rel=0.05)
    e2e_s = page["outrider:e2e_request_latency_seconds_sum"]
    assert page["outrider:time_to_first_token_seconds_sum"] < e2e_s < took_s


def test_tokens_are_counted_while_a_request_runs(tmp_path: Path) -> None:
    with fake_service(tmp_path, step_s=0.005) as service:
        stream = service.client.stream([10, 11], max_tokens=500)
        with stream:
            iter(stream)
            wait_until(lambda: "outrider:generation_tokens_total" in page_of(service).names)
            page = page_of(service)
            before = page["outrider:generation_tokens_total"]
            assert page["outrider:active_requests"] == 1
            for _ in stream:
                if page_of(service)["outrider:generation_tokens_total"] > before:
                    break
            else:
                pytest.fail("the count stood still while tokens came")


def test_the_engines_counters_are_told_as_the_engine_has_them(tmp_path: Path) -> None:
    with fake_service(tmp_path, counters=COUNTERS) as service:
        page = page_of(service)
    assert page["outrider:engine_up"] == 1
    assert page["outrider:spec_decode_num_drafts_total"] == 15
    assert page["outrider:spec_decode_num_draft_tokens_total"] == 40
    assert page["outrider:spec_decode_num_verified_tokens_total"] == 38
    assert page["outrider:spec_decode_num_accepted_tokens_total"] == 30
    per_position = page.by("outrider:spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert per_position == {"0": 15, "1": 11, "2": 4}
    assert sum(per_position.values()) == 30
    depths = page.by("outrider:draft_depth_bucket", "le")
    assert {le: depths[le] for le in ("0.0", "1.0", "2.0", "3.0", "32.0", "+Inf")} == {
        **{"0.0": 3, "1.0": 3, "2.0": 8, "3.0": 18, "32.0": 18, "+Inf": 18}
    }
    assert page["outrider:draft_depth_sum"] == 40
    assert page.by("outrider:proposer_checked_tokens_total", "role") == {"draft": 30, "ngram": 8}
    assert page.by("outrider:proposer_agreed_tokens_total", "role") == {"draft": 24, "ngram": 6}
    for name, value in (("draft", 1.5), ("verify", 4.0), ("transfer", 0.25), ("wait", 0.5)):
        assert page[f"outrider:{name}_time_seconds_total"] == value
    assert (page["outrider:prefix_cache_queries_total"], page["outrider:draft_up"]) == (50, 0)
    assert page["outrider:prefix_cache_hits_total"] == 20
    assert page.by("outrider:ranks_up", "role") == {"target": 2}


def test_without_an_engine_its_part_is_left_out(tmp_path: Path) -> None:
    with fake_service(tmp_path, counters=COUNTERS, down_s=0.3) as service:
        service.client.generate([10], max_tokens=4)
        service.engine.stop()
        wait_until(lambda: page_of(service)["outrider:engine_up"] == 0)
        page = page_of(service)
        with pytest.raises(OutriderError):
            service.client.generate([10], max_tokens=4)
        refused = page_of(service).by("outrider:refused_requests_total", "reason")
    assert page["outrider:generation_tokens_total"] == 4
    assert not any(name.startswith("outrider:spec_decode") for name in page.names)
    assert "outrider:num_requests_running" not in page.names
    assert refused == {"unavailable": 1}


def test_an_engine_that_came_back_is_a_restart_and_its_requests_are_resumed(
    tmp_path: Path,
) -> None:
    with fake_service(tmp_path, deaths=[5]) as service:
        service.client.generate([10, 11], max_tokens=20)
        page = settled(service)
    assert page["outrider:engine_restarts_total"] == 1
    assert page.by("outrider:resumed_requests_total", "reason") == {"engine_lost": 1}
    assert page["outrider:generation_tokens_total"] == 20, "none twice"


def test_the_engines_refusals_are_counted_as_such(tmp_path: Path) -> None:
    def refuse(submit: Any) -> SubmitRefused:
        return SubmitRefused(submit.samples[0].handle, "no room; retry later.", True)

    with fake_service(tmp_path, refuse=refuse) as service:
        with pytest.raises(CapacityError):
            service.client.generate([10], max_tokens=4)
        page = settled(service)
    assert page.by("outrider:refused_requests_total", "reason") == {"overloaded": 1}
    assert page.by("outrider:request_success_total", "reason") == {}


def test_the_phases_of_a_request_and_what_it_asked_for_are_counted(tmp_path: Path) -> None:
    with fake_service(tmp_path, counters=COUNTERS) as service:
        service.client.generate([10, 11], max_tokens=12, n=2, ignore_eos=True)
        service.client.generate([10, 11], max_tokens=1)
        service.client.generate([10, 11], max_tokens=None, ignore_eos=True)
        page = settled(service)
    counts = {
        name: (page[f"outrider:{name}_count"], page[f"outrider:{name}_sum"])
        for name in ("request_params_n", "request_params_max_tokens")
    }
    assert counts == {"request_params_n": (3, 4), "request_params_max_tokens": (2, 13)}
    assert page["outrider:request_max_num_generation_tokens_sum"] == 12 + 1 + 510
    assert page["outrider:request_generation_tokens_sum"] == 24 + 1 + 510
    seconds = {
        phase: page[f"outrider:request_{phase}_time_seconds_sum"]
        for phase in ("prefill", "decode", "inference")
    }
    assert seconds["prefill"] > 0 < seconds["decode"]
    assert seconds["inference"] == pytest.approx(seconds["prefill"] + seconds["decode"])
    assert seconds["inference"] <= page["outrider:e2e_request_latency_seconds_sum"]
    at_most = page.by("outrider:iteration_tokens_bucket", "le")
    assert (at_most["1.0"], at_most["8.0"], at_most["16.0"], at_most["+Inf"]) == (2, 7, 10, 10)
    assert page["outrider:iteration_tokens_sum"] == 70


def test_an_engine_that_does_not_count_the_tokens_of_steps_has_a_page_without(
    tmp_path: Path,
) -> None:
    with fake_service(tmp_path, counters=EngineCounters(steps_by_tokens=(1, 2))) as service:
        page = page_of(service)
    assert page["outrider:engine_up"] == 1
    assert not [name for name in page.names if "iteration_tokens" in name]


def test_vllms_names_have_the_same_values(tmp_path: Path) -> None:
    with fake_service(tmp_path, counters=COUNTERS) as service:
        service.client.generate([10, 11, 12], max_tokens=15)
        page = settled(service)
    expected = {}
    for described in METRICS:
        family = page.families.get(described.full_name)
        for alias in described.vllm_names:
            for sample in family.samples if family is not None else ():
                labels = {VLLM_LABELS.get(key, key): each for key, each in sample.labels.items()}
                if "replica" in labels:
                    labels[described.vllm_replica] = labels["replica"]
                name = alias + sample.name.removeprefix(described.full_name)
                expected[name, frozenset(labels.items())] = sample.value
    theirs = {key: value for key, value in page.values.items() if key[0].startswith("vllm:")}
    assert theirs == expected
    running = [dict(labels) for name, labels in theirs if name == "vllm:num_requests_running"]
    assert running == [{"model_name": MODEL, "engine": "0", "replica": "0"}]
    assert {
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        *("vllm:request_success_total", "vllm:spec_decode_num_drafts_total"),
        *("vllm:spec_decode_num_draft_tokens_total", "vllm:num_preemptions_total"),
        *("vllm:spec_decode_num_accepted_tokens_total", "vllm:inter_token_latency_seconds_sum"),
        *("vllm:spec_decode_num_accepted_tokens_per_pos_total", "vllm:prefix_cache_hits_total"),
        *("vllm:gpu_prefix_cache_hits_total", "vllm:time_per_output_token_seconds_bucket"),
        *("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"),
        *("vllm:request_inference_time_seconds_sum", "vllm:request_params_n_bucket"),
        *("vllm:request_max_num_generation_tokens_sum", "vllm:request_params_max_tokens_sum"),
        *("vllm:iteration_tokens_total_bucket", "vllm:iteration_tokens_total_count"),
    } <= page.names


def test_no_name_of_vllm_is_told_where_it_is_turned_off(tmp_path: Path) -> None:
    with fake_service(tmp_path, server={"vllm_metrics": False}) as service:
        page = page_of(service)
    assert all(name.startswith("outrider:") for name in page.names)


def test_metrics_need_a_key_where_keys_are_set_and_callers_without_are_counted(
    tmp_path: Path,
) -> None:
    options = {"api_key": "secret-of-the-tests"}
    with fake_service(tmp_path, server=options) as service:
        address = service.server.http_address
        assert get(address, "/metrics")[0] == 401
        assert get(address, "/metrics", "another")[0] == 401
        with Client(service.server.grpc_address) as client, pytest.raises(OutriderError):
            client.generate([10], max_tokens=2)
        page = read_page(address, "secret-of-the-tests")
    assert page.by("outrider:refused_requests_total", "reason") == {"unauthenticated": 3}


def test_an_engine_is_asked_once_for_those_who_look_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_page, "KEEP_S", 60.0)
    with fake_service(tmp_path) as service:
        assert page_of(service)["outrider:engine_up"] == 1
        service.engine.stop()
        assert page_of(service)["outrider:engine_up"] == 1, "what was heard a moment ago"


def test_the_load_generator_finds_our_acceptance_on_the_page(tmp_path: Path) -> None:
    sample = ServerSample(0.0, "s", None)
    with fake_service(tmp_path, counters=COUNTERS) as service:
        service.client.generate([10, 11], max_tokens=12)
        settled(service)
        put_metrics(sample, get(service.server.http_address, "/metrics")[1].decode())
    assert (sample.rounds, sample.drafted, sample.accepted) == (15, 40, 30)
    assert sample.accepted_by_position == [15, 11, 4]
    assert (sample.committed, sample.steps, sample.running, sample.waiting) == (12, 10, 0, 0)
