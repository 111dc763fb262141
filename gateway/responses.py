"""A session's deltas as the messages of a stream."""

from __future__ import annotations

from outrider.gateway.convert import (
    FINISH_REASONS,
    PROPOSER_ORIGIN,
    TARGET_ORIGIN,
    logprobs_to_proto,
    stats_to_proto,
)
from outrider.gateway.session import Session
from outrider.proto import generation_pb2
from outrider.text.detokenize import Detokenizer
from outrider.text.outputs import CompletionOutput, OutputDelta
from outrider.text.spans import TextSpans
from outrider.workers.proposers.registry import mark_of


class Responses:
    """Makes the message of each delta, and remembers what has been told."""

    def __init__(self, session: Session, model: str, want_spans: bool) -> None:
        self._session = session
        self._model = model
        self._mark = mark_of(session.prepared.spec.proposer)
        self._has_started = False
        self._num_prompt_logprobs = session.num_prompt_logprobs_held
        self._spans: dict[int, TextSpans] = {}
        if want_spans and session.tokenizer is not None:
            spec = session.prepared.spec
            for index in range(spec.params.n):
                detokenizer = Detokenizer(
                    session.tokenizer, spec.prompt_ids, spec.params.skip_special_tokens
                )
                self._spans[index] = TextSpans(detokenizer, len(session.prepared.echo))
            for delta in session.held:
                self._spans[delta.index].take(delta)

    def make(self, delta: OutputDelta) -> generation_pb2.GenerateResponse:
        output = delta.output.outputs[delta.index]
        is_drafted = delta.is_drafted
        response = generation_pb2.GenerateResponse(
            request_id=delta.request_id,
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
            origins=[PROPOSER_ORIGIN if drafted else TARGET_ORIGIN for drafted in is_drafted],
            rounds=[generation_pb2.Round(**each._asdict()) for each in delta.rounds],
        )
        if any(is_drafted) or delta.index in self._spans:
            response.proposer = self._mark
        if output.logprobs is not None and delta.token_ids:
            response.logprobs.extend(logprobs_to_proto(output.logprobs[-len(delta.token_ids) :]))
        if delta.index in self._spans:
            for num_chars, is_draft in self._spans[delta.index].take(delta):
                origin = PROPOSER_ORIGIN if is_draft else TARGET_ORIGIN
                response.text_spans.add(num_chars=num_chars, origin=origin)
        self._put_prompt_logprobs(response)
        if not self._has_started:
            self._has_started = True
            self._put_start(response)
        if delta.finish_reason is not None:
            _put_end(response, output)
        if self._session.output.finished:
            self._put_summary(response)
        return response

    def _put_prompt_logprobs(self, response: generation_pb2.GenerateResponse) -> None:
        known = self._session.output.prompt_logprobs
        if known is not None and response.index == 0:
            response.prompt_logprobs.extend(logprobs_to_proto(known[self._num_prompt_logprobs :]))
            self._num_prompt_logprobs = len(known)

    def _put_start(self, response: generation_pb2.GenerateResponse) -> None:
        spec = self._session.prepared.spec
        response.start.seed = spec.seed
        response.start.model = self._model
        response.start.prompt_tokens = len(spec.prompt_ids)
        response.start.resume_token = self._session.resume_token

    def _put_summary(self, response: generation_pb2.GenerateResponse) -> None:
        output, summary = self._session.output, response.summary
        summary.usage.prompt_tokens = len(output.prompt_token_ids)
        summary.usage.cached_tokens = output.metrics.num_cached_tokens
        summary.usage.completion_tokens = sum(len(each.token_ids) for each in output.outputs)
        summary.speculation.CopyFrom(stats_to_proto(each.speculation for each in output.outputs))
        summary.timings.time_to_first_token_s = output.metrics.time_to_first_token_s or 0.0
        summary.timings.total_s = output.metrics.latency_s or 0.0
        summary.resubmissions = self._session.resubmissions


def _put_end(response: generation_pb2.GenerateResponse, output: CompletionOutput) -> None:
    end = response.end
    assert output.finish_reason is not None
    end.reason = FINISH_REASONS[output.finish_reason]
    if isinstance(output.stop_reason, str):
        end.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        end.stop_token_id = output.stop_reason
    end.speculation.CopyFrom(stats_to_proto([output.speculation]))
    if output.cumulative_logprob is not None:
        end.cumulative_logprob = output.cumulative_logprob
