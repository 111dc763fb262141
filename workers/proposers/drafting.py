"""A round of drafting, token by token: what proposers with a model share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.scheduler.types import Proposal
from outrider.workers.sampling.draft import DraftStep
from outrider.workers.sampling.rows import Span


class Drafting(NamedTuple):
    """A row that drafts in this round."""

    row: int
    depth: int
    generation: int
    span: Span
    confidences: list[float]
    q: list[Tensor]

    @property
    def proposal(self) -> Proposal:
        q = torch.stack(self.q) if self.q else None
        span = self.span
        return Proposal(self.generation, span.base_len, span.drafts, self.confidences, q)


def start_drafting(row: int, depth: int, generation: int, span: Span) -> Drafting:
    return Drafting(row, depth, generation, span, [], [])


def take_step(active: Sequence[Drafting], step: DraftStep) -> None:
    """Every row goes on by the token it chose."""
    tokens, confidences = step.tokens.tolist(), step.confidence.tolist()
    for index, each in enumerate(active):
        assert isinstance(each.span.drafts, list)
        each.span.drafts.append(tokens[index])
        each.confidences.append(confidences[index])
        if step.q is not None:
            each.q.append(step.q[index])
