"""Drafting rounds, token by token; shared by proposers with a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.types import DraftTokens
from outrider.scheduler.types import Proposal
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.rows import RowTable
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.sampling.draft import DraftSample
from outrider.workers.sampling.rows import LogitSpan, RowSampler
from outrider.workers.sampling.verify import VerificationMode
from outrider.workers.selection import is_likely

_MIN_TEXT, _TEXT_WINDOW = 32, 256  # tokens of the text that likely ids are estimated from
_SHARE_OF_TEXT = 0.94  # that likely ids must cover
_IDS_STEP = 4096


class DraftingRow(NamedTuple):
    """A row that drafts in the current round."""

    row: int
    depth: int
    generation: int
    span: LogitSpan
    confidences: list[float]
    q: list[Tensor]

    def continues(self, least_survival: float) -> bool:
        return len(self.span.drafts) < self.depth and is_likely(self.confidences, least_survival)

    @property
    def proposal(self) -> Proposal:
        q = torch.stack(self.q) if self.q else None
        span = self.span
        return Proposal(self.generation, span.base_len, span.drafts, self.confidences, q)


class RowSamplers:
    """The samplers of drafting rows, created lazily: most rows never draft."""

    def __init__(self, rows: RowTable, runner: Runner | HeadRunner) -> None:
        self._rows = rows
        self._runner = runner
        self._samplers: dict[int, RowSampler] = {}

    def __getitem__(self, row: int) -> RowSampler:
        sampler = self._samplers.get(row)
        if sampler is None:
            runner = self._runner
            sampler = self._samplers[row] = RowSampler.from_init(
                self._rows[row].init, runner.vocab_size, runner.device, runner.vocab.held
            )
        return sampler

    def forget(self, row: int) -> None:
        self._samplers.pop(row, None)

    def clear(self) -> None:
        self._samplers.clear()


def start_drafting(row: int, depth: int, generation: int, span: LogitSpan) -> DraftingRow:
    return DraftingRow(row, depth, generation, span, [], [])


def likely_ids(tokens: Sequence[int], vocab_size: int) -> int:
    """How many of the first ids cover nearly all tokens of a text: most tokenizers number tokens by
    frequency. Scoring the other ids costs more than it gains."""
    if len(tokens) < _MIN_TEXT or vocab_size <= _IDS_STEP:
        return vocab_size
    recent = sorted(tokens[-_TEXT_WINDOW:])
    last = recent[int(_SHARE_OF_TEXT * len(recent))]
    return min((last // _IDS_STEP + 1) * _IDS_STEP, vocab_size)


def ids_to_score(spans: Sequence[LogitSpan], vocab_size: int, mode: VerificationMode) -> int:
    """How many ids to score for these texts: the likely ones, or all if sampling needs all."""
    for span in spans:
        sampler = span.sampler
        if sampler.changes_logits or sampler.has_filters:
            return vocab_size
        if mode == "rejection" and not sampler.is_greedy:
            return vocab_size
    return max(likely_ids(span.tokens, vocab_size) for span in spans)


def draft_in_one_call(
    runner: Runner, chunk: RowChunk, depth: int, span: LogitSpan, least_survival: float = 0.0
) -> DraftTokens | None:
    """A whole round of one row in one call. None if unsupported, or if the row samples by more than
    temperature and shared noise."""
    sampler = span.sampler
    if sampler.changes_logits or sampler.has_filters:
        return None
    temperature = 0.0 if sampler.is_greedy else sampler.temperature
    num_ids = likely_ids(span.tokens, runner.vocab_size)
    return runner.guess(chunk, depth, num_ids, least_survival, temperature, sampler.seed)


def take_step(active: Sequence[DraftingRow], step: DraftSample) -> None:
    """Append each row's drafted token."""
    tokens, confidences = step.tokens.tolist(), step.confidence.tolist()
    for index, each in enumerate(active):
        assert isinstance(each.span.drafts, list)
        each.span.drafts.append(tokens[index])
        each.confidences.append(confidences[index])
        if step.q is not None:
            each.q.append(step.q[index])


def last_tokens(active: Sequence[DraftingRow]) -> list[RowChunk]:
    """The last token of each row, drafted or known, as the next pass reads it."""
    return [
        RowChunk(
            each.row,
            each.span.base_len + len(each.span.drafts) - 1,
            [(each.span.drafts or each.span.tokens)[-1]],
        )
        for each in active
    ]
