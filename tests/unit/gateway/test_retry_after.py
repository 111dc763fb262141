"""When to come again, from the error to what each protocol tells and what the client reads."""

from __future__ import annotations

import pickle
from typing import Any

import grpc
import pytest

from outrider.api_types.errors import (
    MARK,
    RETRY_KEY,
    RateLimitError,
    UnavailableError,
    error_of,
    metadata_of,
)
from outrider.errors import CapacityError, OutriderError
from outrider.gateway.http.errors import error_response


class _Status(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, trailing: Any) -> None:
        self._code, self._trailing = code, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "not now"

    def trailing_metadata(self) -> Any:
        return self._trailing


@pytest.mark.parametrize(
    ("wait_s", "expected"), [(0.01, "1"), (1.0, "1"), (12.3, "13"), (None, "1")]
)
def test_http_tells_whole_seconds_and_always_some(wait_s: float | None, expected: str) -> None:
    for error in (RateLimitError("no", retry_after_s=wait_s), UnavailableError("no")):
        answer = error_response(error)
        assert answer.status_code in (429, 503)
        assert answer.headers["retry-after"] == (expected if error.retry_after_s else "1")
    assert "retry-after" not in error_response(OutriderError("no", retry_after_s=3)).headers


def test_a_grpc_client_reads_what_the_server_knew() -> None:
    trailing = metadata_of(RateLimitError("not now", retry_after_s=12.3))
    found = error_of(_Status(grpc.StatusCode.RESOURCE_EXHAUSTED, trailing), "here")
    assert isinstance(found, CapacityError) and found.retry_after_s == 13.0
    plain = error_of(_Status(grpc.StatusCode.UNAVAILABLE, metadata_of(UnavailableError(""))), "x")
    assert plain.retry_after_s == 1.0
    odd = (MARK, (RETRY_KEY, "soon"))
    assert error_of(_Status(grpc.StatusCode.UNAVAILABLE, odd), "x").retry_after_s is None


def test_errors_keep_it_on_their_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(RateLimitError("no", retry_after_s=5.0)))
    assert (str(error), error.retry_after_s) == ("no", 5.0)
