"""A session's deltas as the messages of a stream, or as one whole response."""

from __future__ import annotations

from typing import TypeAlias

from outrider.api_types.convert import (
    FINISH_REASONS,
    PROPOSER_ORIGIN,
    TARGET_ORIGIN,
    logprobs_to_proto,
    stats_to_proto,
)
from outrider.catalog.proposers import mark_of
from outrider.gateway.session import Session
from outrider.proto import generation_pb2
from outrider.text.detokenize import Detokenizer
from outrider.text.outputs import CompletionOutput, OutputDelta
from outrider.text.spans import TextSpans

_Message: TypeAlias = generation_pb2.GenerateResponse | generation_pb2.GenerateOnceResponse


class Responses:
    """Writes deltas into messages, and tracks what was written."""

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

    def message(self, delta: OutputDelta) -> generation_pb2.GenerateResponse:
        """The message of a stream."""
        message = generation_pb2.GenerateResponse(
            request_id=delta.request_id,
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
        )
        self._write_sample(delta, message)
        self._write_request(delta, message)
        return message

    def add(self, delta: OutputDelta, whole: generation_pb2.GenerateOnceResponse) -> None:
        """Add a delta to a whole response. A sample gets its text and tokens once, at its end."""
        if not whole.samples:
            whole.request_id = delta.request_id
            for each in delta.output.outputs:
                whole.samples.add(request_id=delta.request_id, index=each.index)
        sample, output = whole.samples[delta.index], delta.output.outputs[delta.index]
        self._write_sample(delta, sample)
        self._write_request(delta, whole)
        if output.finished:
            sample.text = output.text
            sample.token_ids.extend(output.token_ids)

    def _write_sample(self, delta: OutputDelta, message: generation_pb2.GenerateResponse) -> None:
        """What a delta adds to its sample, beside text and tokens."""
        output = delta.output.outputs[delta.index]
        is_drafted = delta.is_drafted
        message.origins.extend(
            PROPOSER_ORIGIN if drafted else TARGET_ORIGIN for drafted in is_drafted
        )
        message.rounds.extend(generation_pb2.Round(**each._asdict()) for each in delta.rounds)
        if any(is_drafted) or delta.index in self._spans:
            message.proposer = self._mark
        if output.logprobs is not None and delta.token_ids:
            message.logprobs.extend(logprobs_to_proto(output.logprobs[-len(delta.token_ids) :]))
        if delta.index in self._spans:
            for num_chars, is_draft in self._spans[delta.index].take(delta):
                origin = PROPOSER_ORIGIN if is_draft else TARGET_ORIGIN
                message.text_spans.add(num_chars=num_chars, origin=origin)
        if delta.finish_reason is not None:
            _write_end(message, output)

    def _write_request(self, delta: OutputDelta, message: _Message) -> None:
        """What is known of the request since the last delta."""
        known = self._session.output.prompt_logprobs
        if known is not None and delta.index == 0:
            message.prompt_logprobs.extend(logprobs_to_proto(known[self._num_prompt_logprobs :]))
            self._num_prompt_logprobs = len(known)
        if not self._has_started:
            self._has_started = True
            self._write_start(message)
        if self._session.output.finished:
            self._write_summary(message)

    def _write_start(self, message: _Message) -> None:
        spec = self._session.prepared.spec
        message.start.seed = spec.seed
        message.start.model = self._model
        message.start.prompt_tokens = len(spec.prompt_ids)
        message.start.resume_token = self._session.resume_token

    def _write_summary(self, message: _Message) -> None:
        output, summary = self._session.output, message.summary
        summary.usage.prompt_tokens = len(output.prompt_token_ids)
        summary.usage.cached_tokens = output.metrics.num_cached_tokens
        summary.usage.completion_tokens = output.num_generated
        summary.speculation.CopyFrom(stats_to_proto(each.speculation for each in output.outputs))
        summary.timings.time_to_first_token_s = output.metrics.time_to_first_token_s or 0.0
        summary.timings.total_s = output.metrics.latency_s or 0.0
        summary.resubmissions = self._session.resubmissions


def _write_end(message: generation_pb2.GenerateResponse, output: CompletionOutput) -> None:
    end = message.end
    assert output.finish_reason is not None
    end.reason = FINISH_REASONS[output.finish_reason]
    if isinstance(output.stop_reason, str):
        end.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        end.stop_token_id = output.stop_reason
    end.speculation.CopyFrom(stats_to_proto([output.speculation]))
    if output.cumulative_logprob is not None:
        end.cumulative_logprob = output.cumulative_logprob
