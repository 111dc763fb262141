"""Errors as gRPC statuses, at both ends of a call.

The server turns an error into a status code and its message; the client turns them back into the
same class. So callers of `Client` catch the same errors as callers of `LLM`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import grpc

from outrider.errors import CapacityError, OutriderError, RequestError

# Trailing metadata of every status this server sends; a status without it comes from gRPC itself,
# for example because nothing listens at the address.
MARK = ("outrider-error", "1")
# Also in the metadata, where known: the invalid field of the request, and when to retry.
FIELD_KEY, RETRY_KEY = "outrider-error-field", "outrider-retry-after-s"
RETRY_AFTER_S = 1.0


class UnknownModelError(RequestError):
    """A request names a model that is not served."""


class RequestIdInUseError(RequestError):
    """A request with this id is running."""


class UnauthenticatedError(OutriderError):
    """The API key is missing or not valid."""


class ForbiddenError(OutriderError):
    """The caller may not do this."""


class RateLimitError(CapacityError):
    """The caller's key is at its rate limit."""


class UnavailableError(OutriderError):
    """There is no server, or no engine, or the engine was away for too long."""


class DeadlineError(OutriderError):
    """The request's deadline has passed."""


class RequestCancelledError(OutriderError):
    """The request was cancelled before it was finished."""


_CODES: dict[type[OutriderError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    RequestIdInUseError: grpc.StatusCode.ALREADY_EXISTS,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestCancelledError: grpc.StatusCode.CANCELLED,
}
_FIELD = re.compile(
    r"([a-z][a-z0-9_]{0,40}(?:\[\d{1,9}\]|\.[a-z_]{1,40}){0,8}) (?:is|has|holds|names|must be)\b"
)
_ERRORS = {code: kind for kind, code in _CODES.items()}


def status_of(error: OutriderError) -> grpc.StatusCode:
    """The code of the error's class, or of its nearest base class."""
    found = (_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    return next(found, grpc.StatusCode.INTERNAL)


def field_of(error: OutriderError) -> str | None:
    """The field of the request that an error is about: its message begins with the field."""
    if not isinstance(error, RequestError):
        return None
    known = getattr(error, "param", None)
    found = _FIELD.match(str(error))
    return known or (None if found is None else found.group(1))


def metadata_of(error: OutriderError) -> tuple[tuple[str, str], ...]:
    """The machine-readable part of a status, beside its message."""
    metadata = [MARK]
    if (field := field_of(error)) is not None:
        metadata.append((FIELD_KEY, field))
    if status_of(error) in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
        metadata.append((RETRY_KEY, str(retry_after(error.retry_after_s or RETRY_AFTER_S))))
    return tuple(metadata)


def retry_after(seconds: float) -> int:
    """The value of a Retry-After header: whole seconds, at least one."""
    return max(math.ceil(seconds), 1)


def error_of(status: grpc.RpcError, address: str) -> OutriderError:
    """The error that a failed call's status stands for."""
    code, sentence = status.code(), status.details() or ""
    trailing = [(key, value) for key, value in status.trailing_metadata() or ()]
    if MARK in trailing:
        return _ERRORS.get(code, OutriderError)(sentence, retry_after_s=_wait_of(trailing))
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(f"the server at {address} {_why_unreachable(sentence)}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return OutriderError(f"the server at {address} is no Outrider server of this version.")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError("the request's deadline has passed; allow it more time.")
        case grpc.StatusCode.CANCELLED:
            return RequestCancelledError("the request was cancelled.")
    return _ERRORS.get(code, OutriderError)(f"the call failed: {code.name}: {sentence}")


# Fragments of gRPC's connection errors, and what they mean.
_UNREACHABLE = {
    "CERTIFICATE_VERIFY_FAILED": "shows a certificate that is not trusted here or has expired; "
    "give the file of its authority as tls (--tls-ca).",
    "WRONG_VERSION_NUMBER": "does not speak TLS; leave out tls (--tls-ca) or https://.",
    "ALPN": "speaks HTTP at this port; give the one of gRPC, which is 50051 unless set.",
    "http1.x": "speaks HTTP at this port; give the one of gRPC, which is 50051 unless set.",
    "Socket closed": "closes the connection; it may need TLS (https:// or --tls-ca), or a client "
    "certificate (--client-cert).",
}


def _why_unreachable(details: str) -> str:
    is_refused = details.startswith("failed to connect")  # rather than cut later on
    found = (why for sign, why in _UNREACHABLE.items() if is_refused and sign in details)
    return next(found, "cannot be reached; start one with 'outrider serve' or give its address.")


def _wait_of(trailing: Iterable[tuple[str, str | bytes]]) -> float | None:
    values = [value for key, value in trailing if key == RETRY_KEY]
    return float(values[0]) if values and str(values[0]).isdigit() else None
