"""Keys, scopes and limits through both protocols of a running server."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeService, fake_service
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from waits import wait_until

from outrider.api_types.errors import (
    ForbiddenError,
    RequestCancelledError,
    RequestIdInUseError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.client import Client
from outrider.errors import CapacityError, RequestError
from outrider.gateway.auth.keys_file import key_digest
from outrider.proto import control_pb2, generation_pb2

SECRET_PROMPT = "my deepest secret"


def _entry(name: str, rest: str = "") -> str:
    return f"  - {{name: {name}, sha256: '{key_digest(name + '-key').hex()}'{rest}}}\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(
        "keys:\n"
        + _entry("admin", ", scopes: [infer, admin]")
        + _entry("user")
        + _entry("gone")
        + _entry("old", ", expires: 2020-01-01")
        + _entry("slow", ", requests_per_minute: 1")
        + _entry("short", ", tokens_per_minute: 10")
        + _entry("single", ", max_concurrent: 1")
        + _entry("urgent", ", min_priority: -10, group: team")
        + _entry("mate", ", group: team")
    )
    return path


@pytest.fixture(scope="module")
def service(keys: Path) -> Iterator[FakeService]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.gateway.auth.watched_files.POLL_S", 0.02)
        patch.delenv("OUTRIDER_API_KEY", raising=False)
        with fake_service(keys.parent, server={"api_keys_file": str(keys)}) as found:
            yield found


def _client(service: FakeService, key: str | None) -> Client:
    return Client(service.server.grpc_address, api_key=key)


@pytest.mark.parametrize("key", [None, "wrong", "old-key", "user-key2"])
def test_nobody_gets_in_without_a_key_that_holds(service: FakeService, key: str | None) -> None:
    num_before = len(service.engine.submitted)
    with _client(service, key) as client:
        with pytest.raises(UnauthenticatedError):
            client.generate("Once", max_tokens=2)
        with pytest.raises(UnauthenticatedError):
            client.status()
    assert len(service.engine.submitted) == num_before


def test_ids_are_those_of_a_key_and_an_operator_ends_all_of_an_id(service: FakeService) -> None:
    service.engine.is_paused = True
    try:
        with _client(service, "user-key") as user, _client(service, "admin-key") as admin:
            streams = [each.stream([5, 6], request_id="same") for each in (user, admin)]
            wait_until(lambda: len(service.engine.running) == 2)
            with pytest.raises(RequestIdInUseError, match="'same' is in use"):
                user.generate([5, 6], request_id="same")
            assert admin.abort("same") == 2
            for stream in streams:
                with pytest.raises(RequestCancelledError, match="ended by an operator"):
                    stream.result()
    finally:
        service.engine.is_paused = False


def test_a_scope_is_needed_for_what_changes_the_server(service: FakeService) -> None:
    with _client(service, "user-key") as user, _client(service, "admin-key") as admin:
        assert user.generate([5, 6], max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        assert user.status().state == "serving"
        with pytest.raises(ForbiddenError, match="admin"):
            user.set_speculation("off")
        assert admin.set_speculation("off").policy == "off"


def test_every_method_asks_for_a_key_but_health(service: FakeService) -> None:
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        for file in (control_pb2, generation_pb2):
            for each in file.DESCRIPTOR.services_by_name.values():
                for method in each.methods_by_name:
                    _expect_refusal(channel, f"/{each.full_name}/{method}")
        for version in ("v1", "v1alpha"):
            _expect_refusal(
                channel, f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            )
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def _expect_refusal(channel: grpc.Channel, method: str) -> None:
    """Of what is there: a method nobody has written yet is not."""
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(method)(b"", timeout=60))
    refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
    assert caught.value.code() in refusals, method


def test_reflection_answers_those_with_a_key(service: FakeService) -> None:
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        found = next(
            stub.ServerReflectionInfo(asked, metadata=[("authorization", "Bearer user-key")])
        )
    assert "outrider.v1.Generation" in {e.name for e in found.list_services_response.service}


def test_a_revoked_key_is_refused_while_its_stream_goes_on(
    service: FakeService, keys: Path
) -> None:
    service.engine.step_s = 0.02
    with _client(service, "gone-key") as client:
        stream = client.stream([5, 6], max_tokens=60, ignore_eos=True, speculation="off")
        next(stream)
        keys.write_text(keys.read_text().replace(_entry("gone"), ""))
        wait_until(lambda: _is_refused(client))
        assert stream.result().usage.completion_tokens == 60
    service.engine.step_s = 0.001


def _is_refused(client: Client) -> bool:
    try:
        client.status()
    except UnauthenticatedError:
        return True
    return False


def test_limits_refuse_at_once_and_say_when_to_come_again(service: FakeService) -> None:
    with _client(service, "slow-key") as client:
        client.generate([5, 6], max_tokens=1)
        with pytest.raises(CapacityError, match="1 requests a minute") as caught:
            client.generate([5, 6], max_tokens=1)
        assert 50 < (caught.value.retry_after_s or 0) <= 60
    with _client(service, "short-key") as client:
        client.generate([5, 6], max_tokens=18, ignore_eos=True)
        with pytest.raises(CapacityError, match="10 tokens a minute") as caught:
            client.generate([5, 6], max_tokens=1)
        assert 55 < (caught.value.retry_after_s or 0) <= 66
    service.engine.is_paused = True
    with _client(service, "single-key") as client:
        stream = client.stream([5, 6], max_tokens=1)
        wait_until(lambda: bool(service.engine.running))
        with pytest.raises(CapacityError, match="1 requests at once"):
            client.generate([5, 6], max_tokens=1)
        stream.cancel()
        service.engine.is_paused = False
        wait_until(lambda: _goes_through(client))


def _goes_through(client: Client) -> bool:
    try:
        client.generate([5, 6], max_tokens=1)
    except CapacityError:
        return False
    return True


@pytest.mark.thorough
def test_a_request_that_waits_too_long_is_given_up_and_cancelled(tmp_path: Path) -> None:
    with fake_service(tmp_path, server={"queue_timeout_s": 1.0}, is_paused=True) as service:
        start_s = time.monotonic()
        with pytest.raises(UnavailableError, match="queue_timeout_s") as caught:
            service.client.generate([5, 6], max_tokens=1)
        assert time.monotonic() - start_s < 60
        assert caught.value.retry_after_s == 5
        wait_until(lambda: not service.engine.running and bool(service.engine.cancelled))
        service.engine.is_paused = False
        service.engine.step_s = 0.2  # slow is not late: it has begun in time
        done = service.client.generate([5, 6], max_tokens=8, ignore_eos=True, speculation="off")
        assert done.usage.completion_tokens == 8


def test_what_a_request_may_ask_for_is_bounded_by_settings(tmp_path: Path) -> None:
    bounds = {"max_prompt_tokens": 4, "max_samples": 2, "max_logprobs": 3}
    wrong: list[tuple[list[int], dict[str, Any], str]] = [
        ([5] * 5, {}, "max_prompt_tokens"),
        ([5], {"n": 3}, "max_samples"),
        ([5], {"logprobs": 4}, "max_logprobs"),
        ([5], {"prompt_logprobs": 4}, "max_logprobs"),
    ]
    with fake_service(tmp_path, server=bounds) as service:
        for prompt, asked, setting in wrong:
            with pytest.raises(RequestError, match=rf"server\.{setting}"):
                service.client.generate(prompt, max_tokens=1, **asked)
        service.client.generate([5] * 4, max_tokens=1, n=2, logprobs=3, prompt_logprobs=3)


def test_http_asks_for_no_key_of_probes(service: FakeService) -> None:
    for path in ("/livez", "/readyz", "/health", "/healthz", "/ping", "/version"):
        assert _get(service, path)[0] == 200


def _get(service: FakeService, path: str, *headers: tuple[str, str]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(service.server.http_address, timeout=60)
    try:
        connection.putrequest("GET", path)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_nothing_of_a_prompt_is_logged_whatever_becomes_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("outrider").propagate = True
    with fake_service(tmp_path) as service:
        service.client.generate(SECRET_PROMPT, max_tokens=2)
        wrong: list[dict[str, Any]] = [
            {"stop": [SECRET_PROMPT] * 100},
            {"bad_words": [SECRET_PROMPT * 100]},
            {"max_tokens": 10**6, "model": SECRET_PROMPT},
        ]
        for each in wrong:
            with pytest.raises(RequestError):
                service.client.generate(SECRET_PROMPT * 3, **each)
        with pytest.raises(RequestError):
            service.client.generate(SECRET_PROMPT * 1000)
        with pytest.raises(RequestError):
            service.client.chat([{"role": SECRET_PROMPT, "content": SECRET_PROMPT}] * 20000)
    assert "deepest" not in caplog.text


def test_a_key_leaves_no_more_requests_running_than_it_may_have(service: FakeService) -> None:
    method = "/outrider.v1.Generation/Generate"
    request = generation_pb2.GenerateRequest(text="Once", resumable=True)
    request.sampling.max_tokens = 400
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        generate = channel.unary_stream(method, lambda sent: sent.SerializeToString())
        for _ in range(3):
            stream = generate(request, metadata=[("authorization", "Bearer single-key")])
            next(stream)
            stream.cancel()
            wait_until(lambda: len(service.server.gateway.active_requests) == 0)
    time.sleep(0.05)  # for the engine to hear of the last
    assert service.engine.num_detached == 1


def test_without_a_key_a_call_ends_although_its_request_is_never_sent(service: FakeService) -> None:
    """What strangers have sent of a request would be kept for as long as they like."""
    is_over = threading.Event()

    def nothing_yet() -> Iterator[bytes]:
        is_over.wait(60)
        yield b""

    with grpc.insecure_channel(service.server.grpc_address) as channel:
        generate = channel.stream_unary("/outrider.v1.Generation/Generate")
        try:
            with pytest.raises(grpc.RpcError) as refused:
                generate(nothing_yet(), timeout=60)
        finally:
            is_over.set()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_key_may_not_raise_its_priority_beyond_its_bounds(service: FakeService) -> None:
    with _client(service, "user-key") as user, _client(service, "urgent-key") as urgent:
        with pytest.raises(RequestError, match="priority is -1; the key 'user' may use 0 to 100"):
            user.generate([5, 6], max_tokens=1, priority=-1)
        assert user.generate([5, 6], max_tokens=1, priority=7).usage.completion_tokens == 1
        assert urgent.generate([5, 6], max_tokens=1, priority=-10).usage.completion_tokens == 1
        with pytest.raises(RequestError, match="priority is -11; the key 'urgent' may use -10"):
            urgent.generate([5, 6], max_tokens=1, priority=-11)


def test_a_priority_beyond_the_bounds_of_a_key_is_a_bad_request(service: FakeService) -> None:
    connection = http.client.HTTPConnection(service.server.http_address, timeout=60)
    body = json.dumps({"prompt": [5, 6], "max_tokens": 1, "priority": -1})
    headers = {"Authorization": "Bearer user-key", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    assert answer.status == 400
    assert "priority is -1" in json.loads(answer.read())["error"]["message"]


def test_engines_learn_opaque_tenants_and_salts_of_groups(service: FakeService) -> None:
    specs = {}
    for name in ("user", "urgent", "mate"):
        with _client(service, f"{name}-key") as client:
            client.generate([5, 6], max_tokens=1)
        specs[name] = service.engine.submitted[-1].spec
    assert len({spec.tenant for spec in specs.values()}) == 3
    assert specs["urgent"].cache_salt == specs["mate"].cache_salt != specs["user"].cache_salt
    for name, spec in specs.items():
        assert spec.tenant and spec.cache_salt and name not in spec.tenant + spec.cache_salt
