"""The calls of one request: the first, and those that resume it after a lost connection."""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.api_types.errors import MARK, UnavailableError, error_of
from outrider.api_types.results import Chunk, Completion, Sample
from outrider.proto import generation_pb2
from outrider.text.outputs import Round, Speculation

RESUME_WINDOW_S = 120.0  # the default of `server.resume_window_s`
RELEASE_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
_NO_CONNECTION = "failed to connect"  # gRPC's words: nothing was sent that could be lost
_STOPPING = re.compile("the server (is stopping|was stopped)")
_Code = grpc.StatusCode


@dataclass(slots=True)
class ServerEndpoint:
    """A server, shared by all requests of one client."""

    stub: Any  # `base.Stub`
    address: str
    resumes: bool
    resume_window_s: float
    has_answered: bool = False  # the address is right, so a failure is a lost connection


class Calls:
    """The calls of one request. Makes calls and decides when to retry; the caller does the
    waiting."""

    def __init__(
        self,
        server: ServerEndpoint,
        request: generation_pb2.GenerateRequest,
        timeout_s: float | None,
    ) -> None:
        self.server = server
        self.completion = Completion()
        self.is_complete = False
        self._request = request
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._token = ""
        self._begun: set[int] = set()  # samples with any output received
        self._rounds: defaultdict[int, list[generation_pb2.Round]] = defaultdict(list)
        self._is_over = False
        self._lost_s: float | None = None  # when the connection was lost
        self._num_attempts = 0  # to reconnect since then

    # -- calls --------------------------------------------------------------------------------

    def first(self) -> Any:
        return self.server.stub.Generate(self._request, timeout=self._left_s())

    def again(self) -> Any:
        """Resume from what was received, or start again if nothing was."""
        if not self._token:
            return self.first()
        return self.server.stub.ResumeStream(self._resumption(), timeout=self._left_s())

    def take(self, response: generation_pb2.GenerateResponse) -> Chunk:
        """Add one message of the stream."""
        if self._lost_s is not None:
            self.completion.resumptions += 1
            self._lost_s, self._num_attempts = None, 0
        self.server.has_answered = True
        if response.HasField("start"):
            self._token = response.start.resume_token
        self._begun.add(response.index)
        self._rounds[response.index] += response.rounds
        if response.HasField("summary"):
            self.is_complete = self._is_over = True
        return self.completion.take(response)

    def release(self) -> generation_pb2.ReleaseRequest | None:
        """The message that ends a resumable request at the server; None if cancelling the call
        suffices or the request has ended. Returned once."""
        if self._is_over or not self._request.resumable or not self._token:
            return None
        self._is_over = True
        return generation_pb2.ReleaseRequest(resume_token=self._token)

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0.0)

    def _resumption(self) -> generation_pb2.ResumeRequest:
        completion = self.completion
        return generation_pb2.ResumeRequest(
            request=self._request,
            resume_token=self._token,
            seed=completion.seed,
            samples=[self._held(completion.samples[index]) for index in sorted(self._begun)],
            prompt_logprobs=len(completion.prompt_logprobs),
        )

    def _held(self, sample: Sample) -> generation_pb2.HeldSample:
        done = Speculation()
        for each in self._rounds[sample.index]:
            done.take(
                each.num_verified, Round(each.num_tokens, each.num_accepted, each.num_verified)
            )
        held = generation_pb2.HeldSample(
            index=sample.index,
            token_ids=sample.token_ids,
            finished=sample.finish_reason is not None,
            speculation=generation_pb2.SpeculationStats(
                rounds=done.rounds,
                drafted_tokens=done.drafted,
                accepted_tokens=done.accepted,
                verified_at=done.verified_at,
                accepted_at=done.accepted_at,
            ),
        )
        if sample.logprobs:
            held.cumulative_logprob = 0.0
            for token, position in zip(sample.token_ids, sample.logprobs, strict=True):
                assert position is not None
                held.cumulative_logprob += position[token].logprob
        return held

    # -- losses -------------------------------------------------------------------------------

    def pause_s(self, error: grpc.RpcError, *, is_left: bool) -> float:
        """How long to wait before a retry; raises if the error is final."""
        if is_left or not self._calls_for_more(error):
            self._is_over = True
            raise error_of(error, self.server.address) from None
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now_s
        pause_s = min(FIRST_PAUSE_S * 2.0**self._num_attempts, LONGEST_PAUSE_S)
        pause_s *= random.uniform(0.5, 1.0)
        left_s = self._left_s()
        if left_s is not None and left_s <= pause_s:
            return left_s  # the next call then ends with a deadline error
        if now_s + pause_s > self._lost_s + self.server.resume_window_s:
            raise self._given_up(error)
        self._num_attempts += 1
        return pause_s

    def _calls_for_more(self, error: grpc.RpcError) -> bool:
        code, sentence = error.code(), error.details() or ""
        is_first_loss = self._lost_s is None
        if not self.server.resumes:
            return False
        if MARK not in {(key, value) for key, value in error.trailing_metadata() or ()}:
            was_sent = not sentence.startswith(_NO_CONNECTION) and self.server.has_answered
            is_known = bool(self._token) or was_sent or not is_first_loss
            return is_known and code in (_Code.UNAVAILABLE, _Code.CANCELLED)
        if is_first_loss:
            is_stopping = _STOPPING.match(sentence) is not None
            return code is _Code.UNAVAILABLE and is_stopping and bool(self._token)
        # The server answered this attempt, but could not accept the request.
        is_in_use = code is _Code.ALREADY_EXISTS and not self._token
        return is_in_use or code in (_Code.UNAVAILABLE, _Code.RESOURCE_EXHAUSTED)

    def _given_up(self, error: grpc.RpcError) -> UnavailableError:
        self._is_over = True
        num_tokens = sum(len(sample.token_ids) for sample in self.completion.samples)
        reason = str(error_of(error, self.server.address)).rstrip(".")
        return UnavailableError(
            f"the connection was lost after {num_tokens} tokens and not found again within "
            f"{self.server.resume_window_s:g} s ({reason}); send the request again."
        )
