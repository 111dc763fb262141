"""Builds a sample's output from the scheduler's updates."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import RequestError
from outrider.scheduler.types import FinishReason, RequestUpdate, TokenLogprobs
from outrider.text.detokenize import Detokenizer, StopStrings
from outrider.text.input_processor import PreparedRequest
from outrider.text.outputs import (
    CompletionOutput,
    Logprob,
    OutputDelta,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    Round,
    Speculation,
)
from outrider.text.tokenizer import Tokenizer, token_text


@dataclass(frozen=True, slots=True)
class ResumedText:
    """What a client already has of a sample, for resumption."""

    index: int
    token_ids: tuple[int, ...]
    is_finished: bool = False
    cumulative_logprob: float = 0.0
    speculation: Speculation = field(default_factory=Speculation)


def text_builders(
    prepared: PreparedRequest, tokenizer: Tokenizer | None, arrival_s: float
) -> tuple[RequestOutput, list[TextBuilder]]:
    """The output of a request, still empty, and the builders of its samples."""
    params = prepared.spec.params
    output = RequestOutput(
        prepared.request_id,
        prepared.prompt,
        list(prepared.spec.prompt_ids),
        [],
        RequestMetrics(arrival_s),
        None if params.prompt_logprobs is None else [None],
    )
    builders = [TextBuilder(prepared, index, output, tokenizer) for index in range(params.n)]
    return output, builders


class TextBuilder:
    """One sample: detokenises, applies stop strings, keeps logprobs and the speculation record."""

    def __init__(
        self,
        prepared: PreparedRequest,
        index: int,
        request_output: RequestOutput,
        tokenizer: Tokenizer | None,
    ) -> None:
        spec, params = prepared.spec, prepared.spec.params
        self._params = params
        self._tokenizer = tokenizer
        self._request_output = request_output
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, spec.prompt_ids, params.skip_special_tokens)
        self._stops = StopStrings(prepared.stops, params.include_stop_str_in_output)
        self.output = CompletionOutput(index, spec.seed)
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._echo = prepared.echo
        request_output.outputs.append(self.output)

    def take(self, update: RequestUpdate, now_s: float) -> OutputDelta:
        """Apply an update; returns the delta for a streaming reader."""
        output, record = self.output, self.output.speculation
        self._take_prompt_logprobs(update)
        text, self._echo = self._echo, ""
        taken, stop = 0, None
        for position, token in enumerate(update.token_ids):
            is_last = position == len(update.token_ids) - 1
            ends_text = is_last and update.stop_token_id is not None
            piece, stop = self._push(token, ends_text)
            text += piece
            taken += 1
            output.token_ids.append(token)
            record.drafted_by_token.append(position < update.num_accepted)
            if update.logprobs:
                self._take_logprobs(update.logprobs[position])
            if stop is not None:
                break
        rounds: tuple[Round, ...] = ()
        if update.token_ids:
            num_accepted = min(update.num_accepted, taken)
            rounds = (Round(taken, num_accepted, max(update.num_verified, num_accepted)),)
            record.take(update.num_drafted, rounds[0])
        if stop is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stop
        elif update.finish_reason is not None:
            rest, stop = self._finish_text()
            text += rest
            output.finish_reason = FinishReason.STOP if stop else update.finish_reason
            output.stop_reason = stop or update.stop_token_id
        if text:
            output.pieces.append(text)
        self._take_times(update, now_s)
        return OutputDelta(
            self._request_output.request_id,
            output.index,
            text,
            update.token_ids[:taken],
            rounds,
            output.finish_reason,
            self._request_output,
        )

    def resume_from(self, held: ResumedText) -> OutputDelta:
        """Start from what a client has, which the delta repeats. Which of its tokens were drafted
        is no longer known, only how many."""
        output, pieces = self.output, [self._echo]
        self._echo = ""
        for token in held.token_ids:
            if not held.is_finished:
                piece, stop = self._push(token, ends_text=False)
                pieces.append(piece)
                if stop is not None:
                    raise RequestError(
                        f"the tokens held of sample {held.index} go on after the stop string "
                        f"{stop!r}; resume with what was received."
                    )
            output.token_ids.append(token)
        text = "".join(pieces)
        output.pieces[:] = [text]
        output.speculation = held.speculation
        if output.cumulative_logprob is not None:
            output.cumulative_logprob = held.cumulative_logprob
        if held.is_finished:
            output.finish_reason = FinishReason.STOP  # the client has the real one
        return OutputDelta(
            self._request_output.request_id,
            output.index,
            text,
            held.token_ids,
            (Round(len(held.token_ids), 0, 0),),
            None,
            self._request_output,
        )

    def _push(self, token: int, ends_text: bool) -> tuple[str, str | None]:
        """The text that can be released now, and the stop string it completed, if any."""
        hidden = ends_text and not self._params.include_stop_str_in_output
        if self._detokenizer is None or hidden:
            return "", None
        piece = self._detokenizer.push(token)
        if len(self.output.token_ids) < self._params.min_tokens:
            return piece, None
        return self._stops.push(piece)

    def _finish_text(self) -> tuple[str, str | None]:
        """The rest of the text after the last token, and a stop string if it completes one."""
        if self._detokenizer is None:
            return "", None
        piece, stop = self._stops.push(self._detokenizer.flush())
        return (piece, stop) if stop is not None else (piece + self._stops.flush(), None)

    def _take_logprobs(self, found: TokenLogprobs) -> None:
        output = self.output
        assert output.logprobs is not None and output.cumulative_logprob is not None
        output.logprobs.append(self._by_token(found))
        output.cumulative_logprob += found.logprob

    def _take_prompt_logprobs(self, update: RequestUpdate) -> None:
        known = self._request_output.prompt_logprobs
        if known is not None and self.output.index == 0:
            known += [self._by_token(found) for found in update.prompt_logprobs]

    def _by_token(self, found: TokenLogprobs) -> PositionLogprobs:
        """The top tokens in order, and always the chosen one."""
        table = {
            token: Logprob(logprob, rank, self._text_of(token))
            for rank, (token, logprob) in enumerate(found.top, start=1)
        }
        chosen = Logprob(found.logprob, found.rank, self._text_of(found.token_id))
        table.setdefault(found.token_id, chosen)
        return table

    def _take_times(self, update: RequestUpdate, now_s: float) -> None:
        metrics = self._request_output.metrics
        if metrics.first_token_s is None and update.token_ids:
            metrics.first_token_s = now_s
            metrics.num_cached_tokens = update.num_cached_tokens
            metrics.queued_s = update.queued_s
        if self.output.finished and self._request_output.finished:
            metrics.finished_s = now_s

    def _text_of(self, token: int) -> str:
        return "" if self._tokenizer is None else token_text(self._tokenizer, token)
