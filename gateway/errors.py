"""Which error is which gRPC status, on both ends of a call.

The server turns an error into a code and its sentence, the client turns them back into the same
class. So what a caller of `Client` catches is what a caller of `LLM` would.
"""

from __future__ import annotations

import grpc

from outrider.errors import CapacityError, OutriderError, RequestError

# Trailing metadata of every status this server sends: without it a status comes from gRPC itself,
# as when nobody listens at the address.
MARK = ("outrider-error", "1")


class UnknownModelError(RequestError):
    """A request names a model that is not served."""


class RequestIdInUseError(RequestError):
    """A request with this id is running."""


class UnavailableError(OutriderError):
    """There is no server, or no engine behind it, or it was away for too long."""


class DeadlineError(OutriderError):
    """The request's deadline has passed."""


class RequestCancelledError(OutriderError):
    """The request was cancelled before it was finished."""


_CODES: dict[type[OutriderError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    RequestIdInUseError: grpc.StatusCode.ALREADY_EXISTS,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestCancelledError: grpc.StatusCode.CANCELLED,
}
_ERRORS = {code: kind for kind, code in _CODES.items()}


def status_of(error: OutriderError) -> grpc.StatusCode:
    """The code of an error's class, or of the nearest class it extends."""
    found = (_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    return next(found, grpc.StatusCode.INTERNAL)


def error_of(status: grpc.RpcError, address: str) -> OutriderError:
    """The error a failed call stands for."""
    code, sentence = status.code(), status.details() or ""
    if MARK in {(key, value) for key, value in status.trailing_metadata() or ()}:
        return _ERRORS.get(code, OutriderError)(sentence)
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(
                f"the server at {address} cannot be reached; start one with 'outrider serve' "
                "or give its address."
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return OutriderError(f"the server at {address} is no Outrider server of this version.")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError("the request's deadline has passed; allow it more time.")
        case grpc.StatusCode.CANCELLED:
            return RequestCancelledError("the request was cancelled.")
    return _ERRORS.get(code, OutriderError)(f"the call failed: {code.name}: {sentence}")
