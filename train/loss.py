"""How far a student's distributions are from the teacher's, over the whole vocabulary.

Logits of all tokens would not fit into memory, so they are computed in chunks of rows, and with
each chunk its gradients: nothing of a chunk is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.train.packing import Batch


@dataclass(slots=True)
class Measured:
    """Sums over rows, by how far ahead; divided by `weight` they are means."""

    kl: Tensor
    agreement: Tensor
    overlap: Tensor
    weight: Tensor

    @classmethod
    def zeros(cls, num_levels: int, device: torch.device) -> Measured:
        return cls(*(torch.zeros(num_levels, device=device) for _ in range(4)))

    def add(self, other: Measured) -> None:
        for name in self.__slots__:
            getattr(self, name).add_(getattr(other, name))

    def copy(self) -> Measured:
        return Measured(*(getattr(self, name).clone() for name in self.__slots__))

    def means(self) -> dict[str, list[float]]:
        """Of each level: KL, how often both think the same token likeliest, and the mass that both
        distributions share, which is how likely a sampled draft is accepted."""
        weight = self.weight.clamp_min(1e-9)
        return {
            name: [float(value) for value in (getattr(self, name) / weight).tolist()]
            for name in ("kl", "agreement", "overlap")
        }


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a student guesses with. Level by level: states [tokens, width], the table of `tables`
    [vocabulary, width] that makes logits of them, how many tokens further back than the teacher's
    it looks from, and what the level counts. `vocabulary` are the target's ids of the tables'
    tokens; None: all of them."""

    states: Sequence[Tensor]
    tables: Sequence[Tensor]
    table_of: Sequence[int]
    behind: Sequence[int]
    counts: Sequence[float]
    vocabulary: Tensor | None = None


@dataclass(slots=True)
class _Job:
    """One call; what is measured is left here."""

    teach: Callable[[Tensor], Tensor]
    hidden: Tensor
    batch: Batch
    guesses: Guesses
    chunk_rows: int
    measures: bool
    wants_grads: bool
    measured: Measured = field(init=False)


def distillation_loss(
    teach: Callable[[Tensor], Tensor],
    hidden: Tensor,
    batch: Batch,
    guesses: Guesses,
    *,
    chunk_rows: int,
    measures: bool = True,
) -> tuple[Tensor, Measured]:
    """The mean KL of student from teacher, by the weights of rows and levels. `teach` makes logits
    of rows of `hidden`. Agreement and overlap are only found if it `measures`."""
    wants_grads = torch.is_grad_enabled()
    job = _Job(teach, hidden, batch, guesses, chunk_rows, measures, wants_grads)
    loss: Tensor = _Distilled.apply(job, *guesses.states, *guesses.tables)  # type: ignore[no-untyped-call]
    return loss, job.measured


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Tensor:
        num_levels = len(job.guesses.states)
        device = job.hidden.device
        job.measured = Measured.zeros(num_levels, device)
        grads: list[Tensor] = []
        if job.wants_grads:
            grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]
        valid = [job.batch.inside >= behind for behind in job.guesses.behind]
        totals = torch.stack([(job.batch.weights * each).sum() for each in valid])
        whole = sum(job.guesses.counts)
        # Not by a tensor of the counts, whose way to the device would be waited for.
        scales = torch.stack(
            [
                count / whole / total.clamp_min(1e-9)
                for count, total in zip(job.guesses.counts, totals, strict=True)
            ]
        )
        job.measured.weight += totals
        for first in range(0, len(job.batch.rows), job.chunk_rows):
            _chunk(job, slice(first, first + job.chunk_rows), scales, valid, tensors, grads)
        ctx.grads = grads
        return (job.measured.kl * scales).sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        return (None, *(grad.mul_(outer[0]) for grad in grads))


def _chunk(
    job: _Job,
    part: slice,
    scales: Tensor,
    valid: Sequence[Tensor],
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> None:
    guesses, rows = job.guesses, job.batch.rows[part]
    weights = job.batch.weights[part]
    taught = _taught(job, rows)
    num_levels = len(guesses.states)
    dtype = torch.bfloat16 if rows.is_cuda else torch.float32
    for level, (state, behind) in enumerate(zip(guesses.states, guesses.behind, strict=True)):
        number = num_levels + guesses.table_of[level]
        table = tensors[number].to(dtype)
        used = torch.where(valid[level][part], weights, 0.0)
        origin = (rows - behind).clamp_min(0)
        picked = state[origin].to(dtype)
        guessed = picked @ table.T
        if job.measures:
            _measure(job, level, guessed, taught, used)
        divergences = taught.slopes_in_place(guessed)
        job.measured.kl[level] += (divergences * used).sum()
        if not grads:
            continue
        count = (used * scales[level])[:, None]
        grads[level].index_add_(0, origin, (guessed @ table).float() * count)
        grads[number].add_((guessed.T @ (picked * count).to(dtype)).float())


@dataclass(frozen=True, slots=True)
class _Taught:
    """Of some rows: the teacher's logits of the student's vocabulary, the logarithms of its sums
    over its own, what of that is the student's, and which tokens it thinks likeliest."""

    logits: Tensor
    sums: Tensor
    mass: Tensor
    likeliest: Tensor | None

    def chances(self) -> Tensor:
        return (self.logits.float() - self.sums[:, None]).exp_()

    def slopes_in_place(self, guessed: Tensor) -> Tensor:
        """Leaves in logits the slope of the divergence of each row, and returns the latter."""
        if guessed.is_cuda:
            from outrider.kernels.gpu.distillation import slopes_in_place

            return slopes_in_place(self.logits, self.sums, self.mass, guessed)
        logs = torch.log_softmax(guessed, -1)
        taught = self.logits - self.sums[:, None]
        chances = taught.exp()
        divergences = (chances * (taught - logs)).sum(-1)
        torch.sub(logs.exp_().mul_(self.mass[:, None]), chances, out=guessed)
        return divergences


def _taught(job: _Job, rows: Tensor) -> _Taught:
    logits = job.teach(job.hidden[rows])
    likeliest = logits.argmax(-1) if job.measures else None
    sums = _log_sums(logits)
    vocabulary = job.guesses.vocabulary
    if vocabulary is None:
        return _Taught(logits, sums, torch.ones_like(sums), likeliest)
    logits = logits.index_select(1, vocabulary)
    return _Taught(logits, sums, (_log_sums(logits) - sums).exp(), likeliest)


def _log_sums(logits: Tensor) -> Tensor:
    if logits.is_cuda:
        from outrider.kernels.gpu.distillation import log_sums

        return log_sums(logits)
    return torch.logsumexp(logits, -1)


def _measure(job: _Job, level: int, logits: Tensor, taught: _Taught, used: Tensor) -> None:
    best = logits.argmax(-1)
    if job.guesses.vocabulary is not None:
        best = job.guesses.vocabulary[best]
    guessed = torch.softmax(logits, -1, dtype=torch.float32)
    overlap = torch.minimum(guessed, taught.chances()).sum(-1)
    job.measured.agreement[level] += ((best == taught.likeliest) * used).sum()
    job.measured.overlap[level] += (overlap * used).sum()
