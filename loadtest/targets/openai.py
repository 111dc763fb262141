"""Target for OpenAI-compatible servers, streaming over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import resource
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from outrider.errors import OutriderError
from outrider.loadtest.requests import BenchRequest
from outrider.loadtest.targets.base import Reply, TargetFault, TargetSpec
from outrider.loadtest.targets.http_body import read_body
from outrider.loadtest.targets.openai_stream import (
    MAX_MESSAGE_CHARS,
    CountTokens,
    OpenAiStreamParser,
    error_text,
)
from outrider.loadtest.targets.retries import OverloadedFault, retry_after_s, with_retries

_OPEN_S = 5.0
_DRAIN_S = 1.0  # for the end of a body after [DONE], so that the connection can be reused
_MAX_ERROR_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024
_MAX_LIST_BYTES = 4 * 2**20  # of models
_REFUSAL_S = 5.0  # for the body of an error; the status counts without it
# Well below the 5 s of uvicorn and llama.cpp, so that a connection the server is closing is not
# reused even if timers are late.
_KEEP_ALIVE_S = 2.0
_NO_ROOM = (429, 503)
_KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.EPIPE: "reset",
    errno.ECONNABORTED: "reset",
    # The client's own limits, which say nothing about the server.
    errno.EMFILE: "client out of handles",
    errno.EADDRNOTAVAIL: "client out of ports",
}


class OpenAiTarget:
    """Chat completions for messages, completions for text and token ids."""

    outlives_shifts = False

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._model = spec.model
        parts = urlsplit(spec.url)
        path = parts.path.rstrip("/") or "/v1"
        self._base = f"{parts.scheme}://{parts.netloc}{path}"
        self._session: aiohttp.ClientSession | None = None
        self._count_tokens: CountTokens | None = None
        self._extras = dict(spec.extras)
        options = {"include_usage": True, **(self._extras.pop("stream_options", None) or {})}
        if (
            "continuous_usage_stats" in self._extras
        ):  # vLLM's stream option, accepted at the top level
            options["continuous_usage_stats"] = self._extras.pop("continuous_usage_stats")
        self._common: dict[str, Any] = {"stream": True, "stream_options": options}

    async def open(self) -> None:
        raise_file_limit()
        if self._spec.tokenizer is not None:
            try:
                self._count_tokens = await asyncio.to_thread(_token_counter, self._spec.tokenizer)
            except OutriderError as error:
                raise TargetFault("tokenizer", str(error)) from None
        headers = {"Content-Type": "application/json", **self._spec.headers}
        if self._spec.api_key is not None:
            headers["Authorization"] = f"Bearer {self._spec.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the default of 100 would cap concurrency
                keepalive_timeout=_KEEP_ALIVE_S,
                ttl_dns_cache=300,
                ssl=not self._spec.insecure,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers=headers,
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BYTES,
            trace_configs=[_trace_reuse()],
        )
        try:
            listed = await self._listed_model()
        except BaseException:
            await self.close()
            raise
        self._common["model"] = self._model = self._model or listed

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, request: BenchRequest, reply: Reply) -> None:
        body = _encoded(self._body(request))
        url = f"{self._base}/chat/completions" if request.messages else f"{self._base}/completions"
        reply.sending()
        await with_retries(
            lambda: self._attempt(url, body, reply), reply, max(self._spec.retries, 0)
        )

    # -- one attempt --------------------------------------------------------------------------

    async def _attempt(self, url: str, body: bytes, reply: Reply) -> None:
        if self._session is None:
            raise TargetFault("closed", "the target was closed")
        answer = OpenAiStreamParser(reply, self._count_tokens)
        try:
            response = await self._post(self._session, url, body, reply)
            try:
                if response.status != 200:
                    fault = await _refusal(response)
                    response.release()
                    raise fault
                await self._read(response, answer)
            except BaseException:
                response.close()
                raise
            response.release()
        except (aiohttp.ClientError, OSError, EOFError) as error:
            answer.settle()
            raise fault_of(error) from error
        except BaseException:
            answer.settle()
            raise

    async def _post(
        self, session: aiohttp.ClientSession, url: str, body: bytes, reply: Reply
    ) -> aiohttp.ClientResponse:
        """Posts the request; retries if a reused connection was closed before any byte arrived.

        Some servers (llama.cpp) close keep-alive connections just as the next request is sent.
        The retry is counted. A fresh connection that is closed is a failure of the server.
        """
        while True:
            trace = {"is_reused": False}
            try:
                # Following a redirect would send the headers, with the API key, elsewhere.
                return await session.post(
                    url, data=body, allow_redirects=False, trace_request_ctx=trace
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not trace["is_reused"]:
                    raise
                reply.retries += 1

    async def _read(self, response: aiohttp.ClientResponse, answer: OpenAiStreamParser) -> None:
        content = response.content
        if response.headers.get("Content-Type", "").startswith("application/json"):
            body_text = await _error_body(content)
            raise TargetFault("malformed", f"not a stream: {body_text}"[:MAX_MESSAGE_CHARS])
        feed = answer.feed
        try:
            while data := await content.readany():
                feed(data)
                if answer.is_done:
                    break
        except aiohttp.ClientPayloadError as error:
            if _is_reset(error):
                raise
            answer.end()  # the body is truncated, but the stream may be complete
            response.close()
            return
        answer.end()
        if not content.at_eof():
            await _drain(response)

    # -- requests -----------------------------------------------------------------------------

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        """The body of a request; extras override other fields."""
        body = dict(self._common)
        if request.messages:
            body["messages"] = [{"role": m.role, "content": m.content} for m in request.messages]
        else:
            body["prompt"] = request.text if request.token_ids is None else request.token_ids
        body["max_tokens"] = request.max_tokens
        body["temperature"] = request.temperature
        if request.ignores_eos:
            body["ignore_eos"] = True
        if request.seed is not None:
            body["seed"] = request.seed
        body.update(self._extras)
        return body

    async def _listed_model(self) -> str | None:
        """Queries the served model, which also checks that the server answers."""
        assert self._session is not None
        url = f"{self._base}/models"
        try:
            async with (
                asyncio.timeout(_OPEN_S),
                self._session.get(url, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    if self._model is not None and response.status not in (401, 403):
                        return None
                    raise await _refusal(response)
                listed = json.loads(await read_body(response.content, _MAX_LIST_BYTES, _OPEN_S))
                return str(listed["data"][0]["id"])
        except TimeoutError:
            raise TargetFault("timeout", f"{url} has not answered within {_OPEN_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise fault_of(error) from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            if self._model is not None:
                return None
            raise TargetFault("malformed", f"{url} names no model; give one") from error


def _trace_reuse() -> aiohttp.TraceConfig:
    async def note(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx["is_reused"] = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(note)
    return trace


def raise_file_limit() -> None:
    """Raises the limit of open files to its maximum: every connection takes a handle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems reject their own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fault_of(error: Exception) -> TargetFault:
    """Maps a connection error to a fault."""
    return TargetFault(_kind_of(error), (str(error) or type(error).__name__)[:MAX_MESSAGE_CHARS])


def _kind_of(error: Exception) -> str:
    cause = getattr(error, "os_error", None) or error.__cause__ or error
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "dns"
        case aiohttp.ClientSSLError() | aiohttp.ServerFingerprintMismatch():
            return "tls"
        case aiohttp.ClientPayloadError():
            return "reset" if _is_reset(error) else "cut off"
        case aiohttp.ClientResponseError() | aiohttp.InvalidURL():
            return "malformed"
        case aiohttp.ServerDisconnectedError():
            return "reset"
        case aiohttp.ClientConnectionResetError() | ConnectionResetError():
            return "reset"
    match cause:
        case ssl.SSLError():
            return "tls"
        case socket.gaierror():
            return "dns"
        case ConnectionResetError() | BrokenPipeError():  # aiohttp's own have no errno
            return "reset"
        case OSError(errno=number) if number in _KINDS:
            return _KINDS[number]
    return "unreachable" if isinstance(error, aiohttp.ClientConnectorError) else "connection"


def _is_reset(error: aiohttp.ClientPayloadError) -> bool:
    """aiohttp reports why a body was cut only in the text of its error."""
    return "ConnectionResetError" in str(error) or "BrokenPipeError" in str(error)


async def _refusal(response: aiohttp.ClientResponse) -> TargetFault:
    kind = f"http {response.status}"
    body_text = await _error_body(response.content)
    try:
        message = error_text(json.loads(body_text))
    except (ValueError, RecursionError):
        message = body_text[:MAX_MESSAGE_CHARS]
    if response.status in _NO_ROOM:
        return OverloadedFault(kind, message, retry_after_s(response.headers.get("Retry-After")))
    return TargetFault(kind, message)


async def _error_body(content: aiohttp.StreamReader) -> str:
    return (await read_body(content, _MAX_ERROR_BYTES, _REFUSAL_S)).decode(errors="replace")


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate from a reply; JSON can hold it escaped
        return json.dumps(body).encode()


async def _drain(response: aiohttp.ClientResponse) -> None:
    try:
        async with asyncio.timeout(_DRAIN_S):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError, OSError):
        response.close()  # the reply is complete; only the connection cannot be reused


def _token_counter(source: str) -> CountTokens:
    from outrider.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
