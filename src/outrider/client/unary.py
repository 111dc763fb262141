"""The unary calls of both clients: what each sends, how long it may take, how its answer is read.

A function here gives a method of `Client` and of `AsyncClient` its signature and docstring.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter
from typing import Any, Generic, TypeVar

from outrider.api_types.conversations import detokenize_request, tokenize_request
from outrider.api_types.info import ModelInfo, ServerInfo
from outrider.api_types.results import ServerStatus
from outrider.api_types.speculation import (
    SpeculationAccount,
    account_from_proto,
    explain_request,
    set_request,
    settings_from_proto,
)
from outrider.client.requests import ChatMessage
from outrider.links.speculation import SpeculationSettings
from outrider.proto import control_pb2

STATUS_TIMEOUT_S = 5.0
OPERATION_TIMEOUT_S = 10.0
BETWEEN_STEPS_TIMEOUT_S = 15.0  # a step may be long

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[T]):
    """One request and one answer."""

    method: str  # of the stub
    request: Any
    timeout_s: float
    parse: Callable[[Any], T]

    def start(self, stub: Any) -> Any:
        """The answer, or with asyncio what to await for it."""
        return getattr(stub, self.method)(self.request, timeout=self.timeout_s)


def as_method_of(describe: Callable[..., UnaryCall[Any]]) -> Callable[[Method], Method]:
    """Give a method the name, docstring and signature of `describe`, with the result returned."""
    signature = inspect.signature(describe)
    returned = str(signature.return_annotation).removeprefix("UnaryCall[").removesuffix("]")
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def decorate(method: Method) -> Method:
        made: Any = wraps(describe, assigned=("__name__", "__doc__"))(method)
        del made.__wrapped__
        made.__annotations__ = describe.__annotations__ | {"return": returned}
        made.__signature__ = signature.replace(
            parameters=[own, *signature.parameters.values()], return_annotation=returned
        )
        return method

    return decorate


# -- generation -------------------------------------------------------------------------------


def tokenize(
    prompt: str | Sequence[ChatMessage],
    *,
    add_special_tokens: bool = True,
    timeout_s: float = STATUS_TIMEOUT_S,
    **chat_options: Any,
) -> UnaryCall[list[int]]:
    """Token ids of a text or of a conversation, which takes the options of `chat`."""
    request = tokenize_request(prompt, add_special_tokens, chat_options)
    return UnaryCall("Tokenize", request, timeout_s, lambda answer: list(answer.token_ids))


def detokenize(
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = False,
    timeout_s: float = STATUS_TIMEOUT_S,
) -> UnaryCall[str]:
    """The text of token ids."""
    request = detokenize_request(token_ids, skip_special_tokens)
    return UnaryCall("Detokenize", request, timeout_s, attrgetter("text"))


# -- status and speculation -------------------------------------------------------------------


def status(timeout_s: float = STATUS_TIMEOUT_S) -> UnaryCall[ServerStatus]:
    """The server's state, settings, engines and load."""
    request = control_pb2.GetStatusRequest()
    return UnaryCall("GetStatus", request, timeout_s, ServerStatus.from_proto)


def model_info(timeout_s: float = STATUS_TIMEOUT_S) -> UnaryCall[ModelInfo]:
    """The served model and the defaults of requests."""
    request = control_pb2.GetModelInfoRequest()
    return UnaryCall("GetModelInfo", request, timeout_s, ModelInfo.from_proto)


def server_info(timeout_s: float = STATUS_TIMEOUT_S) -> UnaryCall[ServerInfo]:
    """The server's version and limits."""
    request = control_pb2.GetServerInfoRequest()
    return UnaryCall("GetServerInfo", request, timeout_s, ServerInfo.from_proto)


def set_speculation(
    policy: str | None = None,
    max_depth: int | None = None,
    *,
    lift_max_depth: bool = False,
    timeout_s: float = BETWEEN_STEPS_TIMEOUT_S,
) -> UnaryCall[SpeculationSettings]:
    """Change the server's policy or maximum depth from its next step on; None keeps the
    present value. `lift_max_depth` removes the bound: each request then has its own."""
    request = set_request(policy, max_depth, lift_max_depth)
    return UnaryCall("SetSpeculation", request, timeout_s, settings_from_proto)


def explain_speculation(
    step: int | None = None,
    last: int = 1,
    *,
    timeout_s: float = BETWEEN_STEPS_TIMEOUT_S,
) -> UnaryCall[SpeculationAccount]:
    """Explain a step, or the last ones: candidates, choice and result."""
    request = explain_request(step, last)
    return UnaryCall("ExplainSpeculation", request, timeout_s, account_from_proto)


# -- operators; with API keys these need one of scope `admin` -----------------------------------


def scale(num_replicas: int, timeout_s: float = OPERATION_TIMEOUT_S) -> UnaryCall[None]:
    """Change the number of replicas. Returns at once; `status().cluster.order` shows the
    progress."""
    return UnaryCall("Scale", control_pb2.ScaleRequest(replicas=num_replicas), timeout_s, _nothing)


def roll_out(
    settings: Mapping[str, Any] | None = None, timeout_s: float = OPERATION_TIMEOUT_S
) -> UnaryCall[None]:
    """Replace every replica in turn, or only its draft, with these settings (by path) changed.
    Returns at once. No request is lost."""
    request = control_pb2.RollOutRequest(settings_json=json.dumps(dict(settings or {})))
    return UnaryCall("RollOut", request, timeout_s, _nothing)


def drain(timeout_s: float = OPERATION_TIMEOUT_S) -> UnaryCall[int]:
    """Drain every gateway: refuse new requests. Returns this gateway's active requests."""
    request = control_pb2.DrainRequest()
    return UnaryCall("Drain", request, timeout_s, attrgetter("active_requests"))


def abort(request_id: str, timeout_s: float = OPERATION_TIMEOUT_S) -> UnaryCall[int]:
    """Abort a request wherever it runs; returns how often it was found."""
    request = control_pb2.AbortRequest(request_id=request_id)
    return UnaryCall("Abort", request, timeout_s, attrgetter("num_ended"))


def _nothing(answer: Any) -> None:
    """An order's answer is empty."""
