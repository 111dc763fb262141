"""Verification: which draft tokens are accepted, and the target's own token after them.

`shared`: the target samples at every drafted position with the shared noise, and accepts a draft
token that equals its sample; the text is that of plain decoding. `rejection`: a draft token x is
accepted with probability min(1, p'(x) / q'(x)), else the residual max(p' - q', 0) is sampled
(Leviathan et al., Chen et al.); the text is distributed as p'. In this mode, which draft tokens are
verified may depend on the tokens before them and on q', never on the draft tokens themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.noise import NoiseStream, uniform
from outrider.workers.sampling.chain import process_rows
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.draw import SamplingOps, checked, gumbel_choice, noise_keys
from outrider.workers.sampling.rows import LogitRow, LogitSpan, logit_rows
from outrider.workers.sampling.vocab import VocabPart

VerificationMode = Literal["shared", "rejection"]


def verification_mode(name: str) -> VerificationMode:
    """The mode of a name that was validated before."""
    return "rejection" if name == "rejection" else "shared"


class SpanVerdict(NamedTuple):
    """What the target commits: the first `num_accepted` draft tokens, then one token of its own,
    which is `NO_TOKEN` with NaN logits."""

    num_accepted: int
    tokens: tuple[int, ...]


def verify(
    logits: Tensor,
    spans: Sequence[LogitSpan],
    ops: SamplingOps,
    mode: VerificationMode,
    vocab: VocabPart | None = None,
) -> list[SpanVerdict]:
    """One verdict per span; `logits` [N, vocab] holds the rows of all spans in order.

    With `vocab` they are this rank's part of those rows, and every rank gets the same verdicts.
    """
    if mode == "shared" or all(span.sampler.is_greedy for span in spans):
        return _verify_choices(logits, spans, ops, vocab)
    if not any(span.sampler.is_greedy for span in spans):
        return _verify_by_rejection(logits, spans, ops, vocab)
    verdicts: dict[int, SpanVerdict] = {}
    for is_greedy, decide in ((True, _verify_choices), (False, _verify_by_rejection)):
        members = [i for i, span in enumerate(spans) if span.sampler.is_greedy == is_greedy]
        part = decide(_select(logits, spans, members), [spans[i] for i in members], ops, vocab)
        verdicts.update(zip(members, part, strict=True))
    return [verdicts[i] for i in range(len(spans))]


def acceptance_probability(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """float64 [...]: min(1, p(x) / q(x)) of drafts x = `tokens` [...] under p and q [..., vocab].

    A token with q(x) = 0 cannot have been drafted from q; it is accepted if p(x) > 0.
    """
    p_of_draft = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
    q_of_draft = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
    ratio = (p_of_draft / q_of_draft).clamp(max=1.0)
    return torch.where(q_of_draft > 0, ratio, (p_of_draft > 0).double())


def residual(p: Tensor, q: Tensor) -> Tensor:
    """float64 [..., vocab]: max(p - q, 0), normalised: the distribution after a rejection.

    If it is zero everywhere, p and q are equal and only rounding can have rejected: then it is p.
    """
    left = (p.double() - q.double()).clamp_(min=0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p.double())


def _verify_choices(
    logits: Tensor, spans: Sequence[LogitSpan], ops: SamplingOps, vocab: VocabPart | None
) -> list[SpanVerdict]:
    return accept_matching(sample(logits, spans, ops, vocab=vocab).tolist(), spans)


def accept_matching(chosen: Sequence[int], spans: Sequence[LogitSpan]) -> list[SpanVerdict]:
    """The rule of shared-noise verification: accept the longest prefix of draft tokens equal to the
    target's choices, and commit its choice at the next position (recovered or bonus)."""
    verdicts, first = [], 0
    for span in spans:
        choices = chosen[first : first + span.num_rows]
        accepted = 0
        while accepted < len(span.drafts) and span.drafts[accepted] == choices[accepted]:
            accepted += 1
        verdicts.append(SpanVerdict(accepted, tuple(choices[: accepted + 1])))
        first += span.num_rows
    return verdicts


def _verify_by_rejection(
    logits: Tensor, spans: Sequence[LogitSpan], ops: SamplingOps, vocab: VocabPart | None
) -> list[SpanVerdict]:
    rows = logit_rows(spans)
    scores = process_rows(logits, rows, vocab)
    p = scores.softmax(-1)
    drafted = [row for row in rows if row.num_drafts < len(row.span.drafts)]
    q = _draft_distributions(spans, p)
    accepted = iter(_accept(p, q, drafted))
    final_rows: list[LogitRow] = []
    first = 0
    for span in spans:
        outcomes = [next(accepted) for _ in span.drafts]
        final_rows.append(rows[first + (*outcomes, False).index(False)])
        first += span.num_rows
    own = _sample_after(scores, p, q, drafted, final_rows, ops).tolist()
    return [
        SpanVerdict(row.num_drafts, (*row.span.drafts[: row.num_drafts], token))
        for row, token in zip(final_rows, own, strict=True)
    ]


def _draft_distributions(spans: Sequence[LogitSpan], p: Tensor) -> Tensor:
    """[draft tokens, vocab]: q' at every draft token, one-hot where the proposer was certain."""
    parts = [p.new_zeros(0, p.shape[-1])]
    for span in spans:
        if span.draft_q is not None:
            q = span.draft_q.to(p.device, p.dtype)
            parts.append(functional.pad(q, (0, p.shape[-1] - q.shape[-1])))
        elif len(span.drafts) > 0:
            drafts = torch.tensor(span.drafts, device=p.device)
            parts.append(functional.one_hot(drafts, p.shape[-1]).to(p.dtype))
    return torch.cat(parts)


def _accept(p: Tensor, q: Tensor, drafted: Sequence[LogitRow]) -> list[bool]:
    """Whether each draft token is accepted; `drafted` are the rows that predict them."""
    if not drafted:
        return []
    tokens = torch.tensor([row.span.drafts[row.num_drafts] for row in drafted], device=p.device)
    at = torch.tensor([row.slot for row in drafted], device=p.device)
    seeds, positions = noise_keys(drafted, p.device)
    coins = uniform(
        seeds, torch.full_like(seeds, NoiseStream.ACCEPT), positions, torch.zeros_like(seeds)
    )
    accepted: list[bool] = (coins < acceptance_probability(p[at], q, tokens)).tolist()
    return accepted


def _sample_after(
    scores: Tensor,
    p: Tensor,
    q: Tensor,
    drafted: Sequence[LogitRow],
    final_rows: Sequence[LogitRow],
    ops: SamplingOps,
) -> Tensor:
    """int64: the target's own token of each span, recovered after a rejection or the bonus."""
    final = scores[torch.tensor([row.slot for row in final_rows], device=p.device)]
    q_index = {row.slot: i for i, row in enumerate(drafted)}
    rejected = [i for i, row in enumerate(final_rows) if row.slot in q_index]
    if rejected:
        p_at = torch.tensor([final_rows[i].slot for i in rejected], device=p.device)
        q_at = torch.tensor([q_index[final_rows[i].slot] for i in rejected], device=p.device)
        after = residual(p[p_at], q[q_at]).log()
        final[torch.tensor(rejected, device=p.device)] = after.to(final.dtype)
    streams = torch.full((len(final_rows),), NoiseStream.SHARED, device=p.device)
    streams[rejected] = NoiseStream.RESIDUAL
    return checked(gumbel_choice(final, final_rows, streams, ops), final)


def _select(logits: Tensor, spans: Sequence[LogitSpan], members: Sequence[int]) -> Tensor:
    """The logit rows of some of the spans."""
    starts = [0, *accumulate(span.num_rows for span in spans)]
    at = [row for i in members for row in range(starts[i], starts[i + 1])]
    return logits[torch.tensor(at, device=logits.device)]
