"""The fields of a choice beside its text: of one delta, or of the whole output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.catalog.proposers import mark_of
from outrider.gateway.http.logprobs import (
    Entry,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    num_chars,
    prompt_logprobs,
)
from outrider.gateway.session import Session
from outrider.text.detokenize import Detokenizer
from outrider.text.outputs import OutputDelta, PositionLogprobs, Round
from outrider.text.spans import Piece, TextPieces
from outrider.text.tokenizer import token_text


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """The optional fields that a client requests."""

    is_chat: bool
    token_ids: bool = False
    speculation: bool = False
    prompt_logprobs: bool = False
    names: TokenNames = field(default_factory=lambda: TokenNames(as_ids=False))


@dataclass(slots=True)
class ChoiceDelta:
    """New content of a choice, from one delta or several."""

    token_ids: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prompt_positions: list[PositionLogprobs | None] = field(default_factory=list)

    def add(self, more: ChoiceDelta) -> None:
        self.token_ids += more.token_ids
        self.entries += more.entries
        self.pieces += more.pieces
        self.rounds += more.rounds
        self.prompt_positions += more.prompt_positions

    @property
    def num_positions(self) -> int:
        """Tokens with log-probabilities."""
        return len(self.entries) + len(self.prompt_positions)

    @property
    def is_empty(self) -> bool:
        return not (self.token_ids or self.entries or self.rounds or self.prompt_positions)


class SharedPrompt:
    """Log-probabilities of a prompt, reported by one of its samples for all of them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.positions: list[PositionLogprobs | None] = []

    def take(self) -> None:
        """Call it before the session continues: it drops what it has reported."""
        known = self._session.output.prompt_logprobs
        if known is not None and len(known) > len(self.positions):
            self.positions += known[len(self.positions) :]


class Choice:
    """One choice of a response; `index` is its place among all of them."""

    def __init__(
        self,
        index: int,
        sample: int,
        session: Session,
        prompt: SharedPrompt,
        options: ChoiceOptions,
    ) -> None:
        self.index = index
        self._sample = sample
        self._session = session
        self._prompt = prompt
        self._options = options
        spec = session.prepared.spec
        self._num_top = spec.params.logprobs
        self._has_echo = spec.params.echo
        # Whether it has no fields but text.
        self.is_plain = self._num_top is None and not (
            options.token_ids or options.speculation or options.prompt_logprobs
        )
        self._num_prompt_taken = 0
        self._offset = 0  # of completions' log-probabilities
        self._pieces: TextPieces | None = None
        if options.speculation and session.tokenizer is not None:
            detokenizer = Detokenizer(
                session.tokenizer, spec.prompt_ids, spec.params.skip_special_tokens
            )
            mark = mark_of(spec.proposer)
            self._pieces = TextPieces(detokenizer, mark, len(session.prepared.echo))

    @property
    def text(self) -> str:
        return self._session.output.outputs[self._sample].text

    def take(self, delta: OutputDelta) -> ChoiceDelta:
        taken = ChoiceDelta()
        if self._options.token_ids:
            taken.token_ids = list(delta.token_ids)
        self._take_prompt(taken)
        if self._num_top is not None and delta.token_ids:
            known = delta.output.outputs[self._sample].logprobs or []
            known = known[-len(delta.token_ids) :]
            taken.entries += map(Entry, delta.token_ids, known)
        if self._options.speculation:
            taken.rounds = list(delta.rounds)
            taken.pieces = [] if self._pieces is None else self._pieces.take(delta)
        return taken

    def _take_prompt(self, taken: ChoiceDelta) -> None:
        self._prompt.take()
        start, positions = self._num_prompt_taken, self._prompt.positions
        if start == len(positions):
            return
        self._num_prompt_taken = len(positions)
        if self._options.prompt_logprobs and self._sample == 0:
            taken.prompt_positions = positions[start:]
        if self._has_echo and self._num_top is not None:
            ids = self._session.prepared.spec.prompt_ids[start : len(positions)]
            taken.entries += map(Entry, ids, positions[start:], map(self._text_of, ids))

    def _text_of(self, token_id: int) -> str:
        tokenizer = self._session.tokenizer
        return "" if tokenizer is None else token_text(tokenizer, token_id)

    def details(self, delta: ChoiceDelta, *, is_first: bool, is_last: bool) -> dict[str, Any]:
        """Fields of a choice beside its text."""
        options, output = self._options, self._session.output.outputs[self._sample]
        found: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self._num_top is not None and (delta.entries or is_first):
            found["logprobs"] = self._logprobs(delta.entries)
        if is_last:
            found["finish_reason"], found["stop_reason"] = output.finish_reason, output.stop_reason
        if options.token_ids:
            found["token_ids"] = delta.token_ids
            if is_first and not options.is_chat:
                found["prompt_token_ids"] = list(self._session.prepared.spec.prompt_ids)
        if delta.prompt_positions and not options.is_chat:
            found["prompt_logprobs"] = prompt_logprobs(delta.prompt_positions)
        if options.speculation:
            found["speculation"] = _speculation(delta)
        return found

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        assert self._num_top is not None
        names = self._options.names
        if self._options.is_chat:
            return chat_logprobs(entries, self._num_top, names)
        offset = self._offset
        self._offset += num_chars(entries)
        return completion_logprobs(entries, names, offset)


def _speculation(delta: ChoiceDelta) -> dict[str, Any]:
    return {
        "pieces": [
            {"text": text, "origin": origin.name, "round": origin.round}
            for text, origin in delta.pieces
        ],
        "rounds": [
            {
                "tokens": each.num_tokens,
                "accepted": each.num_accepted,
                "verified": each.num_verified,
            }
            for each in delta.rounds
        ],
    }
