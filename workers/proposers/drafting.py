"""A round of drafting, token by token: what proposers with a model share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.types import Guesses
from outrider.scheduler.types import Proposal
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.rows import RowTable
from outrider.workers.runner import Chunk, Runner
from outrider.workers.sampling.draft import DraftStep
from outrider.workers.sampling.rows import RowSampler, Span
from outrider.workers.sampling.verify import VerificationMode
from outrider.workers.selection import is_likely

_LEAST_TEXT, _TEXT_SEEN = 32, 256  # tokens from which ids are taken as likely
_SHARE_OF_TEXT = 0.94  # that likely ids have to make up
_IDS_AT_ONCE = 4096


class Drafting(NamedTuple):
    """A row that drafts in this round."""

    row: int
    depth: int
    generation: int
    span: Span
    confidences: list[float]
    q: list[Tensor]

    def goes_on(self, least_survival: float) -> bool:
        return len(self.span.drafts) < self.depth and is_likely(self.confidences, least_survival)

    @property
    def proposal(self) -> Proposal:
        q = torch.stack(self.q) if self.q else None
        span = self.span
        return Proposal(self.generation, span.base_len, span.drafts, self.confidences, q)


class RowSamplers:
    """The sampler of each row that drafts, made when it is asked for: most rows never do."""

    def __init__(self, rows: RowTable, runner: Runner | HeadRunner) -> None:
        self._rows = rows
        self._runner = runner
        self._made: dict[int, RowSampler] = {}

    def __getitem__(self, row: int) -> RowSampler:
        found = self._made.get(row)
        if found is None:
            runner = self._runner
            found = self._made[row] = RowSampler.from_init(
                self._rows[row].init, runner.vocab_size, runner.device, runner.vocab.held
            )
        return found

    def forget(self, row: int) -> None:
        self._made.pop(row, None)

    def clear(self) -> None:
        self._made.clear()


def start_drafting(row: int, depth: int, generation: int, span: Span) -> Drafting:
    return Drafting(row, depth, generation, span, [], [])


def likely_ids(tokens: Sequence[int], vocab_size: int) -> int:
    """How many ids a text draws its tokens from, counted from the first on and but for the rarest:
    most tokenizers number tokens by how frequent they are. To guess among the others costs more
    than they are worth."""
    if len(tokens) < _LEAST_TEXT or vocab_size <= _IDS_AT_ONCE:
        return vocab_size
    seen = sorted(tokens[-_TEXT_SEEN:])
    last = seen[int(_SHARE_OF_TEXT * len(seen))]
    return min((last // _IDS_AT_ONCE + 1) * _IDS_AT_ONCE, vocab_size)


def ids_to_guess(spans: Sequence[Span], vocab_size: int, mode: VerificationMode) -> int:
    """The likely ids of all these texts; all ids where a choice depends on others, too."""
    for span in spans:
        sampler = span.sampler
        if sampler.changes_logits or sampler.has_filters:
            return vocab_size
        if mode == "rejection" and not sampler.is_greedy:
            return vocab_size
    return max(likely_ids(span.tokens, vocab_size) for span in spans)


def guess_at_once(
    runner: Runner, chunk: Chunk, depth: int, span: Span, least_survival: float = 0.0
) -> Guesses | None:
    """A round of one row in one call, where its tokens are chosen by their scores and shared noise
    alone; None where they are not, or there is no such call."""
    sampler = span.sampler
    if sampler.changes_logits or sampler.has_filters:
        return None
    temperature = 0.0 if sampler.is_greedy else sampler.temperature
    num_ids = likely_ids(span.tokens, runner.vocab_size)
    return runner.guess(chunk, depth, num_ids, least_survival, temperature, sampler.seed)


def take_step(active: Sequence[Drafting], step: DraftStep) -> None:
    """Every row goes on by the token it chose."""
    tokens, confidences = step.tokens.tolist(), step.confidence.tolist()
    for index, each in enumerate(active):
        assert isinstance(each.span.drafts, list)
        each.span.drafts.append(tokens[index])
        each.confidences.append(confidences[index])
        if step.q is not None:
            each.q.append(step.q[index])
