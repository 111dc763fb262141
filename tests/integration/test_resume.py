"""Streams whose connection is lost: held by the engine or not, resumed at the same gateway or at
another, by the client itself or by somebody who means harm."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cut_connections import Way, way_to
from fake_engine import FakeEngine, FakeService, fake_service, running_server
from waits import wait_until

from outrider.client import (
    AsyncClient,
    Client,
    Completion,
    Stream,
    UnavailableError,
    prompt_request,
)
from outrider.gateway.frontend import Frontend
from outrider.gateway.metrics.requests import CLIENT_BACK
from outrider.proto import generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.thorough]

PROMPT = [10, 11, 12, 13]
OPTIONS: dict[str, Any] = {
    "n": 2,
    "seed": 5,
    "max_tokens": 40,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "ignore_eos": True,
    "want_text_spans": True,
}


@dataclass(frozen=True, slots=True)
class Two:
    """Two gateways before one engine, and a way to the first that can be cut."""

    engine: FakeEngine
    first: Frontend
    other: Frontend
    way: Way
    client: Client

    def cut(self, target: Frontend) -> None:
        self.way.target = target.grpc_address
        self.way.cut()


@contextmanager
def two(folder: Path, *, window_s: float = 20.0, **options: Any) -> Iterator[Two]:
    options = {"step_s": 0.01} | options
    with (
        fake_service(folder, **options) as service,
        running_server(service.engine) as other,
        way_to(service.server.grpc_address) as way,
        Client(way.address, resume_window_s=window_s) as client,
        Client(other.grpc_address) as ready,
    ):
        ready.wait_ready(20)
        client.wait_ready(20)
        yield Two(service.engine, service.server, other, way, client)


def begin(stream: Stream, num_chunks: int = 6) -> Stream:
    for _ in itertools.islice(stream, num_chunks):
        pass
    return stream


def essence(done: Completion) -> Any:
    """What must be the same however often the connection was lost."""
    samples = [
        (
            *(each.text, each.token_ids, each.logprobs, each.cumulative_logprob),
            *(each.finish_reason, each.stop_reason, each.speculation.rounds),
            *(each.speculation.accepted_tokens, each.speculation.block_efficiency),
        )
        for each in done.samples
    ]
    return samples, done.prompt_logprobs, done.seed, done.model, done.usage.completion_tokens


@pytest.mark.parametrize("at_other", [False, True])
@pytest.mark.parametrize("resumable", [False, True])
def test_a_completion_is_the_same_as_if_the_connection_had_not_been_lost(
    tmp_path: Path, resumable: bool, at_other: bool
) -> None:
    with two(tmp_path) as both:
        expected = both.client.generate(PROMPT, **OPTIONS)
        num_submitted = len(both.engine.submitted)
        stream = begin(both.client.stream(PROMPT, resumable=resumable, request_id="x", **OPTIONS))
        target = both.other if at_other else both.first
        both.cut(target)
        done = stream.result()
        assert essence(done) == essence(expected)
        assert (done.resumptions, done.request_id) == (1, "x")
        resumed = target.gateway.metrics.of(target.gateway.model).resumed[CLIENT_BACK]
        assert resumed._value.get() == 1
        assert [is_held for _, is_held in both.engine.attached] == [True] * resumable
        assert len(both.engine.submitted) - num_submitted == (1 if resumable else 2)
        if not resumable:  # a claim of having been let in before skips no limit
            assert not both.engine.submitted[-1].is_resumed
        wait_until(lambda: not both.engine.running and both.engine._held.num_samples == 0)


def test_a_stream_may_be_cut_again_and_again(tmp_path: Path) -> None:
    with two(tmp_path) as both:
        expected = both.client.generate(PROMPT, **OPTIONS)
        stream = both.client.stream(PROMPT, resumable=True, **OPTIONS)
        for target in (both.other, both.first, both.other):
            begin(stream, 4)
            both.cut(target)
        done = stream.result()
        assert essence(done) == essence(expected)
        assert done.resumptions >= 2


@pytest.mark.parametrize("options", [{"stop": [" s"]}, {"echo": True}, {"min_tokens": 20}])
def test_what_is_held_back_or_begun_with_is_told_once(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    options = OPTIONS | options
    with two(tmp_path) as both:
        expected = both.client.generate(PROMPT, **options)
        stream = begin(both.client.stream(PROMPT, resumable=True, **options), 3)
        both.cut(both.other)
        assert essence(stream.result()) == essence(expected)


@pytest.mark.parametrize("resumable", [False, True])
def test_spans_go_on_with_the_text(tmp_path: Path, resumable: bool) -> None:
    with two(tmp_path) as both:
        stream = both.client.stream(PROMPT, resumable=resumable, **OPTIONS)
        begin(stream, 5)
        both.cut(both.other)
        for chunk in stream:
            assert sum(size for size, _ in chunk.spans) == len(chunk.text)


def test_an_engine_that_is_lost_meanwhile_is_given_the_request_anew(tmp_path: Path) -> None:
    with two(tmp_path) as both:
        expected = both.client.generate(PROMPT, **OPTIONS)
        stream = begin(both.client.stream(PROMPT, resumable=True, **OPTIONS))
        both.way.is_closed = True
        both.way.cut()
        lives = both.engine.lives
        both.engine.die()
        wait_until(lambda: both.engine.lives > lives)
        both.way.target, both.way.is_closed = both.other.grpc_address, False
        assert essence(stream.result()) == essence(expected)
        assert [is_held for _, is_held in both.engine.attached] == [False]


def test_after_the_window_the_request_is_generated_anew_from_there(tmp_path: Path) -> None:
    with two(tmp_path, resume_window_s=0.05) as both:
        expected = both.client.generate(PROMPT, **OPTIONS)
        stream = begin(both.client.stream(PROMPT, resumable=True, **OPTIONS))
        both.engine.is_paused = True
        both.way.is_closed = True
        both.way.cut()
        wait_until(lambda: not both.engine.running)
        both.engine.is_paused, both.way.is_closed = False, False
        assert essence(stream.result()) == essence(expected)
        assert [is_held for _, is_held in both.engine.attached] == [False]


def test_more_than_may_wait_for_their_clients_are_ended_and_generated_anew(
    tmp_path: Path,
) -> None:
    with two(tmp_path, max_resumable=1, is_paused=True) as both:
        expected = both.client.stream(PROMPT, **OPTIONS)
        streams = [both.client.stream(PROMPT, resumable=True, **OPTIONS) for _ in range(3)]
        wait_until(lambda: len(both.engine.submitted) == 4)
        both.engine.is_paused = False
        for stream in streams:
            begin(stream, 4)
        both.engine.is_paused = True
        both.way.is_closed = True
        both.way.cut()
        wait_until(lambda: both.engine.num_detached == 1 and len(both.engine.running) == 2)
        both.engine.is_paused, both.way.is_closed = False, False
        done = [stream.result() for stream in streams]
        assert {str(essence(each)) for each in done} == {str(essence(expected.result()))}
        assert sorted(is_held for _, is_held in both.engine.attached) == [False, False, True]


def test_asyncio_clients_go_on_as_well(tmp_path: Path) -> None:
    async def read(address: str, cut: Callable[[], None]) -> Completion:
        async with AsyncClient(address) as client:
            stream = client.stream(PROMPT, resumable=True, **OPTIONS)
            async for _ in stream:
                if sum(len(each.token_ids) for each in stream.completion.samples) > 10:
                    break
            cut()
            return await stream.result()

    with two(tmp_path) as both:
        expected = both.client.generate(PROMPT, **OPTIONS)
        done = asyncio.run(read(both.way.address, lambda: both.cut(both.other)))
        assert essence(done) == essence(expected)
        assert done.resumptions == 1


# -- when it does not go on -------------------------------------------------------------------


def test_a_server_that_is_not_found_again_is_one_sentence(tmp_path: Path) -> None:
    with two(tmp_path, window_s=0.4) as both:
        stream = begin(both.client.stream(PROMPT, resumable=True, **OPTIONS))
        both.way.is_closed = True
        both.way.cut()
        with pytest.raises(UnavailableError, match=r"lost after \d+ tokens .* within 0.4 s"):
            list(stream)


def test_whoever_does_not_want_to_resume_is_told_at_once(tmp_path: Path) -> None:
    with two(tmp_path) as both, Client(both.way.address, resume=False) as client:
        stream = begin(client.stream(PROMPT, **OPTIONS))
        both.way.cut()
        with pytest.raises(UnavailableError, match="cannot be reached"):
            list(stream)


def test_nobody_is_waited_for_at_an_address_that_never_answered() -> None:
    started_s = time.monotonic()
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match="cannot be"):
        client.generate(PROMPT)
    assert time.monotonic() - started_s < 20


def test_a_request_cut_before_its_first_token_is_sent_again(tmp_path: Path) -> None:
    with two(tmp_path, is_paused=True) as both:
        stream = both.client.stream(PROMPT, resumable=True, **OPTIONS)
        wait_until(lambda: len(both.engine.submitted) == 1)
        both.cut(both.other)
        wait_until(lambda: len(both.engine.cancelled) == 2)  # nobody could come back for these
        both.engine.is_paused = False
        assert len(stream.result().samples[0].token_ids) == 40


def test_the_deadline_of_a_request_holds_across_connections(tmp_path: Path) -> None:
    from outrider.client import DeadlineError

    with two(tmp_path) as both:
        stream = both.client.stream(
            PROMPT, resumable=True, timeout_s=0.6, max_tokens=400, ignore_eos=True
        )
        begin(stream, 3)
        both.cut(both.other)
        with pytest.raises(DeadlineError):
            list(stream)
        wait_until(lambda: not both.engine.running)


# -- leaving ----------------------------------------------------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path, step_s=0.01) as running:
        yield running


@pytest.fixture
def stub(service: FakeService) -> Iterator[Any]:
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        yield generation_pb2_grpc.GenerationStub(channel)


def long_request(**options: Any) -> generation_pb2.GenerateRequest:
    return prompt_request(PROMPT, max_tokens=400, ignore_eos=True, **options)


def test_a_resumable_request_goes_on_when_its_call_ends_and_another_does_not(
    service: FakeService, stub: Any
) -> None:
    for resumable in (True, False):
        call = stub.Generate(long_request(resumable=resumable))
        next(call)
        call.cancel()
    wait_until(lambda: service.engine.num_detached == 1)
    wait_until(lambda: len(service.engine.running) == 1)
    wait_until(lambda: service.client.status().active_requests == 0)


def test_a_client_that_cancels_a_resumable_request_ends_it_for_good(service: FakeService) -> None:
    stream = begin(service.client.stream(PROMPT, resumable=True, max_tokens=400, ignore_eos=True))
    stream.cancel()
    wait_until(lambda: not service.engine.running)
    assert service.engine.num_detached == 0
    [(asked, _)] = service.engine.attached
    assert asked.samples == ()


def test_a_cancelled_task_ends_its_resumable_request_for_good(service: FakeService) -> None:
    async def leave() -> None:
        async with AsyncClient(service.server.grpc_address) as client:
            stream = client.stream(PROMPT, resumable=True, max_tokens=400, ignore_eos=True)
            await anext(stream)
            reading = asyncio.create_task(stream.result())
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.wait({reading})
            assert stream._releasing is not None
            await stream._releasing

    asyncio.run(leave())
    wait_until(lambda: not service.engine.running)
    assert service.engine.num_detached == 0


def test_whoever_comes_back_takes_the_place_of_a_reader_not_known_to_be_gone(
    service: FakeService, stub: Any
) -> None:
    request = long_request(resumable=True, request_id="mine")
    abandoned = stub.Generate(request)
    had = next(abandoned)
    resumed = stub.ResumeStream(resume_of(request, had))
    tokens = [*had.token_ids, *(token for each in resumed for token in each.token_ids)]
    assert len(tokens) == 400
    with pytest.raises(grpc.RpcError) as caught:
        list(abandoned)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert len(service.engine.submitted) == 1


# -- harm -------------------------------------------------------------------------------------


def resume_of(
    sent: generation_pb2.GenerateRequest, had: generation_pb2.GenerateResponse, **changes: Any
) -> generation_pb2.ResumeRequest:
    values: dict[str, Any] = {
        "request": sent,
        "resume_token": had.start.resume_token,
        "seed": had.start.seed,
        "samples": [{"token_ids": list(had.token_ids)}],
    }
    return generation_pb2.ResumeRequest(**values | changes)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"resume_token": ""}, grpc.StatusCode.PERMISSION_DENIED),
        ({"resume_token": "A" * 108}, grpc.StatusCode.PERMISSION_DENIED),
        ({"seed": 1}, grpc.StatusCode.PERMISSION_DENIED),
        ({"request": {"text": "another"}}, grpc.StatusCode.PERMISSION_DENIED),
        ({"samples": [{"token_ids": [10**6]}]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"samples": [{"token_ids": [5] * 401}]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"samples": [{"index": 1}]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"samples": [{}, {}]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"prompt_logprobs": 4}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"prompt_logprobs": 2**32 - 1}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_resumption_that_cannot_be_right_is_refused(
    service: FakeService, stub: Any, changes: dict[str, Any], code: grpc.StatusCode
) -> None:
    request = long_request()
    with pytest.raises(grpc.RpcError) as caught:
        call = stub.Generate(request)
        had = next(call)
        call.cancel()
        list(stub.ResumeStream(resume_of(request, had, **changes)))
    assert caught.value.code() is code
    assert caught.value.details().count(". ") == 0
    wait_until(lambda: service.client.status().active_requests == 0)


def test_tokens_that_were_never_generated_get_nothing_that_was(
    service: FakeService, stub: Any
) -> None:
    request = long_request(resumable=True)
    call = stub.Generate(request)
    had = next(call)
    call.cancel()
    wait_until(lambda: service.engine.num_detached == 1)
    made_up = [token + 1 for token in had.token_ids]
    resumed = stub.ResumeStream(resume_of(request, had, samples=[{"token_ids": made_up}]))
    next(resumed)
    resumed.cancel()
    assert [is_held for _, is_held in service.engine.attached] == [False]
    assert list(service.engine.submitted[-1].samples[0].output_ids) == made_up


def test_one_who_has_everything_gets_nothing_more(service: FakeService, stub: Any) -> None:
    request = long_request()
    call = stub.Generate(request)
    had = next(call)
    call.cancel()
    held = [{"token_ids": [5], "finished": True}]
    assert list(stub.ResumeStream(resume_of(request, had, samples=held))) == []


def test_bytes_that_are_no_resumption_are_refused(service: FakeService) -> None:
    with grpc.insecure_channel(service.server.grpc_address) as channel:
        for method in ("ResumeStream", "Release"):
            call = channel.unary_unary(f"/outrider.v1.Generation/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff\xff", timeout=10)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_nobody_releases_what_is_not_theirs(service: FakeService, stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Release(generation_pb2.ReleaseRequest(resume_token="A" * 108))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_resumption_is_refused_while_as_many_wait_as_may(service: FakeService, stub: Any) -> None:
    from outrider.links.gateway_messages import SubmitRefused

    request = long_request()
    call = stub.Generate(request)
    had = next(call)
    call.cancel()
    service.engine.refuse = lambda submit: (
        None if submit.is_resumed else SubmitRefused(submit.samples[0].handle, "full.", True)
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.ResumeStream(resume_of(request, had)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
