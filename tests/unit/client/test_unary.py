"""Both clients make the same unary calls; they differ in how they wait."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.client import AsyncClient, Client
from outrider.errors import RequestError
from outrider.proto import control_pb2

UNARY = (
    *("status", "model_info", "server_info", "tokenize", "detokenize"),
    *("set_speculation", "explain_speculation", "scale", "roll_out", "drain", "abort"),
)
NOWHERE = "127.0.0.1:9"  # nothing listens there; the tests must not connect


@pytest.mark.parametrize("name", UNARY)
def test_a_method_has_the_same_signature_in_both_clients(name: str) -> None:
    blocking, awaited = getattr(Client, name), getattr(AsyncClient, name)
    assert inspect.signature(blocking) == inspect.signature(awaited)
    assert inspect.iscoroutinefunction(awaited) and not inspect.iscoroutinefunction(blocking)
    assert (blocking.__name__, awaited.__name__) == (name, name)
    assert blocking.__doc__ == awaited.__doc__ and blocking.__doc__


def test_a_signature_names_what_is_returned() -> None:
    signature = str(inspect.signature(Client.detokenize)).replace("'", "")
    assert signature == (
        "(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, "
        "timeout_s: float = 5.0) -> str"
    )
    assert list(inspect.signature(Client(NOWHERE).abort).parameters) == ["request_id", "timeout_s"]


def test_both_send_the_same_request_and_read_the_same_answer() -> None:
    sent: list[tuple[Any, float]] = []

    def answer(request: Any, timeout: float) -> control_pb2.AbortResponse:
        sent.append((request, timeout))
        return control_pb2.AbortResponse(num_ended=2)

    async def answer_later(request: Any, timeout: float) -> control_pb2.AbortResponse:
        return answer(request, timeout)

    async def abort() -> int:
        client = AsyncClient(NOWHERE)
        client._server.stub = SimpleNamespace(Abort=answer_later)
        return await client.abort("r", timeout_s=3.0)

    client = Client(NOWHERE)
    client._server.stub = SimpleNamespace(Abort=answer)
    assert client.abort("r", timeout_s=3.0) == asyncio.run(abort()) == 2
    assert sent == [(control_pb2.AbortRequest(request_id="r"), 3.0)] * 2


def test_a_closed_client_refuses_every_call() -> None:
    client = Client(NOWHERE)
    client.close()
    for call in (client.status, client.drain, client.wait_ready, lambda: client.stream("a")):
        with pytest.raises(RequestError, match="this client of 127.0.0.1:9 was closed"):
            call()
