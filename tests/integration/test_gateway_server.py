"""The server around the streams: health, reflection, status, draining, and as a process."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import (
    SECRET,
    FakeEngine,
    FakeService,
    fake_facts,
    fake_service,
    fake_tokenizer_source,
    in_loop,
    only_link,
    places_of,
    running_server,
)
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from waits import wait_until

from outrider.api_types.errors import RequestCancelledError
from outrider.client import AsyncClient, Client, UnavailableError
from outrider.config import ServerConfig
from outrider.errors import ConfigError
from outrider.gateway.frontend import Frontend
from outrider.gateway.gateway import GatewayState
from outrider.gateway.grpc.server import GENERATION

pytestmark = pytest.mark.thorough

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(autouse=True)
def quick_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.gateway.served_model.load_tokenizer", fake_tokenizer_source)


# -- health -----------------------------------------------------------------------------------


@pytest.mark.parametrize("service_name", ["", GENERATION])
def test_health_follows_the_engine(tmp_path: Path, service_name: str) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with running_server(engine) as server, grpc.insecure_channel(server.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service_name)
        changes = (answer.status for answer in stub.Watch(request, timeout=20))
        assert next(changes) == NOT_SERVING
        engine.start()
        assert next(changes) == SERVING
        engine.stop()
        assert next(changes) == NOT_SERVING
        engine.start()
        assert next(changes) == SERVING
        engine.stop()


def test_control_is_healthy_without_an_engine(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with running_server(engine) as server, grpc.insecure_channel(server.grpc_address) as channel:
        request = health_pb2.HealthCheckRequest(service="outrider.v1.Control")
        assert health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status == SERVING


# -- reflection and status --------------------------------------------------------------------


def test_reflection_lists_the_services_and_knows_their_messages(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with running_server(engine) as server, grpc.insecure_channel(server.grpc_address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == {
            "outrider.v1.Generation",
            "outrider.v1.Control",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        file = database.FindFileContainingSymbol("outrider.v1.GenerateRequest")
        assert "GenerateResponse" in [message.name for message in file.message_type]


def test_the_stable_reflection_answers_like_the_older_one_and_knows_itself(tmp_path: Path) -> None:
    """grpc-js and grpcurl ask for it first."""
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with running_server(engine) as server, grpc.insecure_channel(server.grpc_address) as channel:
        services = _reflected(channel, list_services="").list_services_response.service
        assert [each.name for each in services] == sorted(
            ProtoReflectionDescriptorDatabase(channel).get_services()
        )
        pool = DescriptorPool()
        for symbol in ("outrider.v1.Generation", "grpc.reflection.v1.ServerReflection"):
            answer = _reflected(channel, file_containing_symbol=symbol)
            files = map(
                FileDescriptorProto.FromString,
                answer.file_descriptor_response.file_descriptor_proto,
            )
            for file in reversed(list(files)):  # what they import comes behind
                pool.Add(file)
        (method,) = pool.FindServiceByName("grpc.reflection.v1.ServerReflection").methods
        assert method.input_type.full_name == "grpc.reflection.v1.ServerReflectionRequest"
        assert "Generate" in pool.FindServiceByName("outrider.v1.Generation").methods_by_name


def _reflected(channel: grpc.Channel, **asked: str) -> reflection_pb2.ServerReflectionResponse:
    ask = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return next(ask(iter([reflection_pb2.ServerReflectionRequest(**asked)]), timeout=60))


def test_status_shows_settings_ranks_and_load(tmp_path: Path) -> None:
    with fake_service(tmp_path, server={"model_names": ("small",)}) as service:
        service.client.generate("a", max_tokens=7)
        status = service.client.status()
        assert (status.model, status.state, status.active_requests) == ("small", "serving", 0)
        assert status.settings is not None and status.engine is not None
        assert (status.settings.depth, status.settings.depth_reason) == (3, "the default on cpu")
        assert status.settings.policy == "goodput"
        assert [(rank.role, rank.rank, rank.pid) for rank in status.engine.ranks] == [
            ("target", 0, 101),
            ("target", 1, 102),
            ("draft", 0, 103),
        ]
        assert status.engine.committed_tokens == 7


def test_status_shows_no_depth_where_the_policy_is_off(tmp_path: Path) -> None:
    with fake_service(tmp_path, facts=fake_facts(speculation_policy="off")) as service:
        settings = service.client.status().settings
        assert settings is not None
        assert (settings.policy, settings.depth) == ("off", 0)
        assert settings.depth_reason == "as the policy says"


def test_status_without_its_engine_still_knows_the_settings(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        service.engine.stop()
        wait_until(lambda: service.client.status().state == "engine away")
        status = service.client.status()
        assert status.engine is None and status.settings is not None


def test_an_engine_that_does_not_answer_does_not_hold_up_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.gateway.routing.engine_link.STATUS_TIMEOUT_S", 0.1)
    with fake_service(tmp_path, answers_status=False) as service:
        status = service.client.status()
        assert (status.state, status.engine) == ("serving", None)


# -- life -------------------------------------------------------------------------------------


def _asynchronously(tmp_path: Path, body: Any, **options: Any) -> None:
    """Run `body(server, engine, client)` in the server's own event loop."""
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock", step_s=0.005).start()

    async def run() -> None:
        server = Frontend(SECRET, ServerConfig(port=0, grpc_port=0, **options))
        await server.start()
        await server.gateway.replicas.publish_fixed(engine.address)
        try:
            async with AsyncClient(server.grpc_address) as client:
                while server.gateway.state is not GatewayState.SERVING:
                    await asyncio.sleep(0.01)
                await body(server, engine, client)
        finally:
            await server.stop(drain_s=0.0)

    try:
        asyncio.run(asyncio.wait_for(run(), 20))
    finally:
        engine.stop()


def test_a_server_that_stops_finishes_what_it_has(tmp_path: Path) -> None:
    async def body(server: Frontend, engine: FakeEngine, client: AsyncClient) -> None:
        stream = client.stream([1, 2, 3], max_tokens=60)
        await anext(stream)
        stopping = asyncio.create_task(server.stop(drain_s=10))
        await asyncio.sleep(0.02)
        with pytest.raises(UnavailableError):
            await client.generate("a")
        assert len((await stream.result()).samples[0].token_ids) == 60
        await stopping

    _asynchronously(tmp_path, body)


def test_a_server_that_must_stop_cancels_what_does_not_end(tmp_path: Path) -> None:
    async def body(server: Frontend, engine: FakeEngine, client: AsyncClient) -> None:
        engine.is_paused = True
        stream = client.stream([1, 2, 3])
        while not engine.running:
            await asyncio.sleep(0.01)
        await server.stop(drain_s=0.1)
        with pytest.raises(UnavailableError, match="the server was stopped"):
            await stream.result()

    _asynchronously(tmp_path, body)


@pytest.mark.parametrize("drains", [False, True])
def test_an_engine_that_ends_after_the_last_request_of_a_stopping_server_is_not_missed(
    drains: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(server: Frontend, engine: FakeEngine, client: AsyncClient) -> None:
        await client.generate("a", max_tokens=2)
        if drains:
            await server.gateway.drain()
        engine.stop()
        while server.gateway.replicas.connected:
            await asyncio.sleep(0.01)

    _asynchronously(tmp_path, body)
    assert ("the engine is lost" in caplog.text) is not drains


def test_a_stop_does_not_wait_for_those_who_only_watch(tmp_path: Path) -> None:
    async def body(server: Frontend, engine: FakeEngine, client: AsyncClient) -> None:
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            seen = [answer.status async for answer in _first(watch)]
            await server.stop(drain_s=1000)  # `body` has no more than seconds
            assert seen == [SERVING]

    _asynchronously(tmp_path, body)


async def _first(watch: Any) -> AsyncIterator[Any]:
    async for answer in watch:
        if answer.status == SERVING:
            yield answer
            return


def test_health_says_that_a_server_drains_while_it_still_finishes(tmp_path: Path) -> None:
    async def body(server: Frontend, engine: FakeEngine, client: AsyncClient) -> None:
        engine.is_paused = True
        stream = client.stream([1, 2, 3], max_tokens=4)
        while not engine.running:
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(server.stop(drain_s=1000))
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while (await check(health_pb2.HealthCheckRequest())).status == SERVING:
                await asyncio.sleep(0.01)
        engine.is_paused = False
        assert len((await stream.result()).samples[0].token_ids) == 4
        await stopping

    _asynchronously(tmp_path, body)


def test_a_request_that_waits_for_an_engine_can_be_ended(tmp_path: Path) -> None:
    async def body(server: Frontend, engine: FakeEngine, client: AsyncClient) -> None:
        engine.is_paused = True
        stream = client.stream([1, 2, 3], request_id="mine")
        while not engine.running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.stop)
        while server.gateway.state is not GatewayState.ENGINE_AWAY:
            await asyncio.sleep(0.01)
        assert server.gateway.active_requests.abort("another") == 0
        assert server.gateway.active_requests.abort("mine") == 1
        with pytest.raises(RequestCancelledError, match="'mine' was ended by an operator"):
            await stream.result()

    _asynchronously(tmp_path, body)


def test_a_server_that_is_busy_or_far_away_is_waited_for(tmp_path: Path) -> None:
    """Longer than the pause between attempts to reach one that refuses."""

    async def body(server: Frontend, engine: FakeEngine, client: AsyncClient) -> None:
        async def open_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.5)
            host, _, port = server.grpc_address.rpartition(":")
            behind, beyond = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_pass_on(reader, beyond), _pass_on(behind, writer))

        door = await asyncio.start_server(open_late, "127.0.0.1", 0)
        port = door.sockets[0].getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}") as far:
            assert (await far.status()).engine is not None
        door.close()

    _asynchronously(tmp_path, body)


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    sink.close()


def test_ipv6_is_served_on_both_ports(tmp_path: Path) -> None:
    with fake_service(tmp_path, server={"host": "::1"}) as service:
        assert service.client.generate([1, 2, 3], max_tokens=4).usage.completion_tokens == 4
        host, _, port = service.server.http_address.rpartition(":")
        assert host == "[::1]"
        connection = http.client.HTTPConnection("::1", int(port), timeout=20)
        connection.request("GET", "/readyz")
        assert connection.getresponse().status == 200
        connection.close()


def test_cancelling_the_task_that_reads_cancels_the_request(tmp_path: Path) -> None:
    async def body(server: Frontend, engine: FakeEngine, client: AsyncClient) -> None:
        engine.is_paused = True
        reading = asyncio.create_task(client.generate([1, 2, 3]))
        while not engine.running:
            await asyncio.sleep(0.01)
        reading.cancel()
        while engine.running:
            await asyncio.sleep(0.01)
        assert engine.cancelled == [engine.submitted[0].samples[0].handle]

    _asynchronously(tmp_path, body)


def test_a_taken_port_is_told_in_one_sentence(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock")
    with (
        running_server(engine) as server,
        pytest.raises(ConfigError, match=f"cannot listen on {server.grpc_address}; the port"),
    ):
        asyncio.run(_start(int(server.grpc_address.rpartition(":")[2])))


async def _start(port: int) -> None:
    await Frontend(SECRET, ServerConfig(port=0, grpc_port=port)).start()


def test_an_engine_that_moves_is_found_at_its_new_address(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        service.engine.stop()
        service.engine.address = f"unix:{tmp_path}/moved.sock"
        service.engine.start()
        replicas = service.server.gateway.replicas
        in_loop(service.server, replicas.publish("", places_of([service.engine])))
        wait_until(lambda: only_link(service.server).number == 2, 10)
        assert service.client.generate([1], max_tokens=3).usage.completion_tokens == 3


def test_the_gateway_runs_as_a_process_and_ends_on_sigterm(tmp_path: Path) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/engine.sock").start()
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.gateway"]
        + ["--engine", engine.address, "--set", "server.grpc_port=0", "--set", "server.port=0"],
        env=os.environ | {"OUTRIDER_SECRET": SECRET},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with Client(address) as client:
            client.wait_ready(20)
            assert client.generate("Hello", max_tokens=5).usage.completion_tokens == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        engine.stop()


def test_the_gateway_process_needs_its_secret() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outrider.gateway", "--engine", "unix:/nowhere"],
        env={name: value for name, value in os.environ.items() if name != "OUTRIDER_SECRET"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: OUTRIDER_SECRET is not set; "
        "set it to the same text for engine, ranks and gateways.\n"
    )


def test_many_requests_do_not_pile_up(tmp_path: Path) -> None:
    """What is kept for a request is let go when it ends."""
    with fake_service(tmp_path) as service:
        _run_all_kinds(service)
        wait_until(lambda: service.client.status().active_requests == 0)
        assert only_link(service.server)._sinks == {}
        assert len(only_link(service.server)._queries) == 0


def _run_all_kinds(service: FakeService) -> None:
    service.client.generate([1], max_tokens=3, n=2)
    with service.client.stream([1], max_tokens=None) as stream:
        next(stream)
    with pytest.raises(UnavailableError):
        service.engine.is_paused = True
        service.engine.refuse = lambda submit: service.engine.die()
        service.client.generate([1])
