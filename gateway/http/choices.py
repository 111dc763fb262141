"""What is told of each text beside the text itself, of a delta or of the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
from outrider.workers.proposers.registry import mark_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client wants told."""

    is_chat: bool
    token_ids: bool = False
    speculation: bool = False
    prompt_logprobs: bool = False
    names: TokenNames = field(default_factory=lambda: TokenNames(as_ids=False))


@dataclass(slots=True)
class Told:
    """What one delta or several have brought."""

    token_ids: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prompt_positions: list[PositionLogprobs | None] = field(default_factory=list)

    def add(self, more: Told) -> None:
        self.token_ids += more.token_ids
        self.entries += more.entries
        self.pieces += more.pieces
        self.rounds += more.rounds
        self.prompt_positions += more.prompt_positions

    @property
    def num_positions(self) -> int:
        """Tokens of which log-probabilities are told."""
        return len(self.entries) + len(self.prompt_positions)

    @property
    def is_empty(self) -> bool:
        return not (self.token_ids or self.entries or self.rounds or self.prompt_positions)


class SharedPrompt:
    """Log-probabilities of a prompt, which one of its samples brings for all of them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.positions: list[PositionLogprobs | None] = []

    def take(self) -> None:
        """Call it before the session goes on: it forgets what it has told."""
        known = self._session.output.prompt_logprobs
        if known is not None and len(known) > len(self.positions):
            self.positions += known[len(self.positions) :]


class Choice:
    """One text of an answer; `index` is its place among all of them."""

    def __init__(
        self, index: int, sample: int, session: Session, prompt: SharedPrompt, wanted: Wanted
    ) -> None:
        self.index = index
        self._sample = sample
        self._session = session
        self._prompt = prompt
        self._wanted = wanted
        spec = session.prepared.spec
        self._num_top = spec.params.logprobs
        self._has_echo = spec.params.echo
        # Whether there is nothing to tell but text.
        self.is_plain = self._num_top is None and not (
            wanted.token_ids or wanted.speculation or wanted.prompt_logprobs
        )
        self._num_prompt_told = 0
        self._offset = 0  # of completions' log-probabilities
        self._pieces: TextPieces | None = None
        if wanted.speculation and session.tokenizer is not None:
            detokenizer = Detokenizer(
                session.tokenizer, spec.prompt_ids, spec.params.skip_special_tokens
            )
            mark = mark_of(spec.proposer)
            self._pieces = TextPieces(detokenizer, mark, len(session.prepared.echo))

    @property
    def text(self) -> str:
        return self._session.output.outputs[self._sample].text

    def take(self, delta: OutputDelta) -> Told:
        told = Told()
        if self._wanted.token_ids:
            told.token_ids = list(delta.token_ids)
        self._take_prompt(told)
        if self._num_top is not None and delta.token_ids:
            known = delta.output.outputs[self._sample].logprobs or []
            known = known[-len(delta.token_ids) :]
            told.entries += map(Entry, delta.token_ids, known)
        if self._wanted.speculation:
            told.rounds = list(delta.rounds)
            told.pieces = [] if self._pieces is None else self._pieces.take(delta)
        return told

    def _take_prompt(self, told: Told) -> None:
        self._prompt.take()
        start, positions = self._num_prompt_told, self._prompt.positions
        if start == len(positions):
            return
        self._num_prompt_told = len(positions)
        if self._wanted.prompt_logprobs and self._sample == 0:
            told.prompt_positions = positions[start:]
        if self._has_echo and self._num_top is not None:
            ids = self._session.prepared.spec.prompt_ids[start : len(positions)]
            told.entries += map(Entry, ids, positions[start:], map(self._text_of, ids))

    def _text_of(self, token_id: int) -> str:
        tokenizer = self._session.tokenizer
        return "" if tokenizer is None else token_text(tokenizer, token_id)

    def details(self, told: Told, *, is_first: bool, is_last: bool) -> dict[str, Any]:
        """Fields of a choice beside its text."""
        wanted, output = self._wanted, self._session.output.outputs[self._sample]
        found: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self._num_top is not None and (told.entries or is_first):
            found["logprobs"] = self._logprobs(told.entries)
        if is_last:
            found["finish_reason"], found["stop_reason"] = output.finish_reason, output.stop_reason
        if wanted.token_ids:
            found["token_ids"] = told.token_ids
            if is_first and not wanted.is_chat:
                found["prompt_token_ids"] = list(self._session.prepared.spec.prompt_ids)
        if told.prompt_positions and not wanted.is_chat:
            found["prompt_logprobs"] = prompt_logprobs(told.prompt_positions)
        if wanted.speculation:
            found["speculation"] = _speculation(told)
        return found

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        assert self._num_top is not None
        names = self._wanted.names
        if self._wanted.is_chat:
            return chat_logprobs(entries, self._num_top, names)
        offset = self._offset
        self._offset += num_chars(entries)
        return completion_logprobs(entries, names, offset)


def _speculation(told: Told) -> dict[str, Any]:
    return {
        "pieces": [
            {"text": text, "origin": origin.name, "round": origin.round}
            for text, origin in told.pieces
        ],
        "rounds": [
            {
                "tokens": each.num_tokens,
                "accepted": each.num_accepted,
                "verified": each.num_verified,
            }
            for each in told.rounds
        ],
    }
