"""Bytes that are no requests, and requests that nobody meant: typed refusals, and nothing left."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeService, fake_service
from fuzzing import mutated
from waits import wait_until

from outrider.client import chat_request, prompt_request
from outrider.proto import control_pb2, generation_pb2

CASES = 60  # of each method
LIMIT_S = 60.0
NEVER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED}

_SAMPLED = prompt_request(
    [1, 2, 3],
    max_tokens=4,
    temperature=0.5,
    stop=["a"],
    logit_bias={5: 1.0},
    logprobs=2,
    seed=3,
    n=2,
)
_CHAT = chat_request([{"role": "user", "content": "Hello"}], max_tokens=4)
_HELD = generation_pb2.ResumeRequest(
    request=_SAMPLED,
    resume_token="abc",
    seed=3,
    samples=[generation_pb2.HeldSample(index=0, token_ids=[5, 6])],
)
METHODS: dict[str, list[Any]] = {
    "Generation/Generate": [_SAMPLED, _CHAT],
    "Generation/GenerateOnce": [_SAMPLED, _CHAT],
    "Generation/ResumeStream": [_HELD],
    "Generation/Tokenize": [generation_pb2.TokenizeRequest(text="Hello"), _CHAT],
    "Generation/Detokenize": [generation_pb2.DetokenizeRequest(token_ids=[1, 2, 3])],
    "Control/GetStatus": [control_pb2.GetStatusRequest()],
    "Control/SetSpeculation": [control_pb2.SetSpeculationRequest(policy="off", max_depth=3)],
    "Control/ExplainSpeculation": [control_pb2.ExplainSpeculationRequest(last=2)],
    "Control/GetModelInfo": [control_pb2.GetModelInfoRequest()],
    "Control/GetServerInfo": [control_pb2.GetServerInfoRequest()],
    "Control/Abort": [control_pb2.AbortRequest(request_id="x")],
}
_STREAMS = ("Generate", "ResumeStream")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("gw")) as running:
        yield running


def _num_tasks(service: FakeService) -> int:
    keeping = service.server.gateway._watching
    assert keeping is not None

    async def count() -> int:
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), keeping.get_loop()).result(60)


@pytest.mark.parametrize("method", METHODS)
def test_mutated_messages_are_answered_or_refused_by_name(
    service: FakeService, method: str
) -> None:
    rng = random.Random(method)
    num_tasks = _num_tasks(service)
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        path = f"/outrider.v1.{method}"
        is_stream = method.endswith(_STREAMS)
        call = channel.unary_stream(path) if is_stream else channel.unary_unary(path)
        for _ in range(CASES):
            data = mutated(rng, rng.choice(METHODS[method]).SerializeToString())
            try:
                answer = call(data, timeout=LIMIT_S)
                if is_stream:
                    for _, _ in zip(range(50), answer, strict=False):
                        pass
                    answer.cancel()
            except grpc.RpcError as error:
                assert error.code() not in NEVER, (data, error.details())
                assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or is_stream, data
    wait_until(lambda: not service.engine.running, 10)
    wait_until(lambda: _num_tasks(service) <= num_tasks + 2, 10)
    assert service.client.generate([1, 2], max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_bytes_of_no_protocol_harm_nobody(service: FakeService, protocol: str) -> None:
    rng = random.Random(protocol)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n" + b"{}" * 10
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x01" * 30
    valid = head if protocol == "http" else start
    address = service.server.http_address if protocol == "http" else service.server.grpc_address
    host, _, port = address.rpartition(":")
    num_tasks = _num_tasks(service)
    for number in range(CASES):
        data = mutated(rng, valid) if number % 2 else rng.randbytes(rng.randint(1, 300))
        with socket.create_connection((host, int(port)), LIMIT_S) as sock:
            sock.settimeout(0.02)
            try:
                sock.sendall(data)
                answer = sock.recv(4096)
            except (TimeoutError, ConnectionError):
                continue
            assert not answer.startswith(b"HTTP/1.1 5"), data
    wait_until(lambda: _num_tasks(service) <= num_tasks + 2, 20)
    assert service.client.generate([1, 2], max_tokens=3).usage.completion_tokens == 3


def test_connections_that_come_and_go_leave_no_descriptor(service: FakeService) -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_open()
    for address in (service.server.http_address, service.server.grpc_address) * 40:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), LIMIT_S).close()
    wait_until(lambda: num_open() <= before + 4, 10)
