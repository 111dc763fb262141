"""Requests of every kind at once, what came of them, and how long a newcomer had to wait."""

from __future__ import annotations

import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from waits import wait_until

from outrider import OutriderError
from outrider.client import Client

LIMIT_S = 300.0  # for a stream as a whole, whatever happens to it
TOLERANCE = 1e-4  # of log-probabilities: what was computed anew may have been in another batch
NUM_TOKENS = 260
STARTS = 4
_RETRY_S = 0.05
_LATER_S = 0.3


class Asked(NamedTuple):
    """A request, over gRPC unless told."""

    params: Mapping[str, Any]
    is_http: bool = False


LOAD: Sequence[Asked] = [
    Asked({"prompt": "the sky is", "temperature": 0.0, "resumable": True}),
    Asked({"prompt": "once upon a time", "seed": 1, "n": 2, "resumable": True}),
    Asked({"prompt": "one two three", "seed": 2, "logprobs": 2, "resumable": True}),
    Asked({"prompt": "a list of", "seed": 3, "repetition_penalty": 1.2, "logprobs": 1, "n": 2}),
    Asked({"prompt": "in the year", "seed": 4, "frequency_penalty": 0.6, "top_k": 40, "n": 2}),
    Asked({"prompt": "because of", "temperature": 0.0, "presence_penalty": 1.0, "resumable": True}),
    Asked({"prompt": "the river", "seed": 6, "n": 2, "logprobs": 1}, is_http=True),
    Asked({"prompt": "my name is", "seed": 7, "presence_penalty": 0.5, "top_p": 0.9}, is_http=True),
]


class Reader:
    """Reads one request to its end in a thread of its own."""

    def __init__(
        self,
        scene: Addresses,
        asked: Asked,
        *,
        may_ask_again: bool,
        speculates: bool,
        num_tokens: int,
    ) -> None:
        self.arrivals_s: list[float] = []
        self.num_tokens = 0
        self.num_moved = 0  # times it went on at another engine or over another connection
        self.num_lost = 0  # answers that broke off and were asked for again from the beginning
        self.result: Any = None
        self.origins: list[list[str]] = []  # of each sample's tokens, who guessed them; over gRPC
        self.error: Exception | None = None
        self._scene = scene
        self._asked = asked
        self._may_ask_again = may_ask_again
        self._common: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
        if not speculates:
            self._common["speculation"] = "off"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(LIMIT_S)

    def _run(self) -> None:
        read = self._read_http if self._asked.is_http else self._read_grpc
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            try:
                self.result = read()
                return
            except (OSError, OutriderError, http.client.HTTPException, BrokenOffError) as error:
                was_refused = isinstance(error, RefusedError)
                is_again = self._asked.is_http and (was_refused or self._may_ask_again)
                if not is_again or time.monotonic() > deadline_s:
                    self.error = error
                    return
                self.num_lost += not was_refused
                self.num_tokens = 0
                time.sleep(_RETRY_S)

    def _read_grpc(self) -> Any:
        with Client(self._scene.grpc_address) as client:
            client.wait_ready(LIMIT_S)
            stream = client.stream(**(self._common | dict(self._asked.params)), timeout_s=LIMIT_S)
            for chunk in stream:
                self._note(len(chunk.token_ids))
            done = stream.completion
        self.num_moved = done.resumptions + done.resubmissions
        self.origins = [each.origins for each in done.samples]
        return [
            (each.text, each.token_ids, _plain(each.logprobs), each.finish_reason)
            for each in done.samples
        ]

    def _read_http(self) -> Any:
        body = self._common | {"return_token_ids": True}
        sent = json.dumps(body | dict(self._asked.params) | {"stream": True})
        connection = http.client.HTTPConnection(self._scene.http_address, timeout=LIMIT_S)
        choices: dict[int, list[Any]] = {}
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", sent, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RefusedError(response.read().decode())
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return sorted(choices.items())
                if line.startswith(b"data: "):
                    self._take(json.loads(line.removeprefix(b"data: ")), choices)
        finally:
            connection.close()
        raise BrokenOffError("the stream ended before it was done")

    def _take(self, event: dict[str, Any], choices: dict[int, list[Any]]) -> None:
        if "error" in event:
            raise BrokenOffError(event["error"]["message"])
        for choice in event["choices"]:
            ids = choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            found = choices.setdefault(choice["index"], ["", [], [], None])
            found[0] += choice["text"]
            found[1] += ids
            found[2] += zip(
                logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True
            )
            found[3] = choice["finish_reason"] or found[3]
            self._note(len(ids))

    def _note(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.arrivals_s.append(time.monotonic())


class BrokenOffError(Exception):
    """An answer over HTTP that ended too soon."""


class RefusedError(BrokenOffError):
    """There was none: the gateway has just begun, for example."""


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """Where a scene is served."""

    grpc_address: str
    http_address: str


class Running:
    """The whole load, under way."""

    def __init__(
        self,
        where: Addresses,
        load: Sequence[Asked] = LOAD,
        *,
        num_tokens: int = NUM_TOKENS,
        may_ask_again: bool = False,
        speculates: bool = True,
    ) -> None:
        self._load = load
        self._reader = partial(
            Reader,
            where,
            may_ask_again=may_ask_again,
            speculates=speculates,
            num_tokens=num_tokens,
        )
        self.readers = [self._reader(each) for each in self._load]

    def wait_tokens(self, number: int) -> None:
        """Until each stream has `number` tokens and none is over. On a busy machine one may end
        before the last begins: then all start again."""
        for _ in range(STARTS):
            wait_until(
                lambda: all(each.num_tokens >= number or each.is_over for each in self.readers),
                LIMIT_S,
            )
            if not any(each.is_over for each in self.readers):
                return
            self.results()
            self.readers = [self._reader(each) for each in self._load]
        raise AssertionError("streams are over before all have begun")

    @property
    def errors(self) -> list[Exception]:
        return [each.error for each in self.readers if each.error is not None]

    @property
    def num_lost(self) -> int:
        return sum(each.num_lost for each in self.readers)

    @property
    def num_moved(self) -> int:
        """Streams that were."""
        return sum(each.num_moved > 0 for each in self.readers)

    @property
    def origins(self) -> list[list[list[str]]]:
        """Of streams over gRPC that are over, who guessed each token of each sample."""
        return [each.origins for each in self.readers if each.origins]

    def longest_pause_s(self) -> float:
        pauses = [
            after - before
            for each in self.readers
            for before, after in zip(each.arrivals_s, each.arrivals_s[1:], strict=False)
        ]
        return max(pauses, default=0.0)

    def results(self) -> list[Any]:
        for each in self.readers:
            each.join()
        assert not [each for each in self.readers if not each.is_over], "a stream does not end"
        assert not self.errors, self.errors
        return [each.result for each in self.readers]


class Newcomer:
    """Asks for a token until it gets one, from a moment later on, so that what died is missed by
    then. `accepted_s` is when the request that was answered was sent, `token_s` when it was."""

    def __init__(self, where: Addresses) -> None:
        self.accepted_s = self.token_s = 0.0
        self._where = where
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert self.token_s, "no new request was answered"

    def _ask(self) -> None:
        time.sleep(_LATER_S)
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            sent_s = time.monotonic()
            try:
                with Client(self._where.grpc_address, resume=False) as client:
                    client.generate("hello", max_tokens=1, ignore_eos=True, timeout_s=LIMIT_S)
            except OutriderError:
                time.sleep(_RETRY_S)
                continue
            self.accepted_s, self.token_s = sent_s, time.monotonic()
            return


def is_same(one: Any, other: Any) -> bool:
    """Equal, numbers that are not whole up to the tolerance."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= TOLERANCE
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_plain(getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
