"""The distillation loss: KL from teacher to student over the whole vocabulary.

Logits of all tokens do not fit into memory, so logits and gradients are computed in chunks of
rows, and nothing of a chunk is saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.train.packing import PackedBatch


@dataclass(slots=True)
class DistillationMetrics:
    """Weighted sums over rows, one entry a draft token; divided by `weight` they are means."""

    kl: Tensor
    agreement: Tensor
    overlap: Tensor
    weight: Tensor

    @classmethod
    def zeros(cls, num_draft_tokens: int, device: torch.device) -> DistillationMetrics:
        return cls(*(torch.zeros(num_draft_tokens, device=device) for _ in range(4)))

    def add(self, other: DistillationMetrics) -> None:
        for name in self.__slots__:
            getattr(self, name).add_(getattr(other, name))

    def copy(self) -> DistillationMetrics:
        return DistillationMetrics(*(getattr(self, name).clone() for name in self.__slots__))

    def means(self) -> dict[str, list[float]]:
        """For each draft token: KL, how often both have the same argmax, and the overlap of both
        distributions, which is the acceptance probability of a sampled draft token."""
        weight = self.weight.clamp_min(1e-9)
        return {
            name: [float(value) for value in (getattr(self, name) / weight).tolist()]
            for name in ("kl", "agreement", "overlap")
        }


@dataclass(frozen=True, slots=True)
class DraftOutputs:
    """A student's outputs, one entry a draft token: its hidden states [tokens, width], which of
    `lm_heads` [vocabulary, width] makes logits of them, how many tokens before the teacher's
    state it reads, and its weight in the loss. `vocabulary` maps the heads' tokens to target ids;
    None: they are the target's."""

    states: Sequence[Tensor]
    lm_heads: Sequence[Tensor]
    lm_head_of: Sequence[int]
    offsets: Sequence[int]
    draft_weights: Sequence[float]
    vocabulary: Tensor | None = None


@dataclass(slots=True)
class _LossCall:
    """Arguments of one call, and its metrics."""

    teach: Callable[[Tensor], Tensor]
    hidden: Tensor
    batch: PackedBatch
    draft_outputs: DraftOutputs
    chunk_rows: int
    with_metrics: bool
    needs_grads: bool
    metrics: DistillationMetrics = field(init=False)


def distillation_loss(
    teach: Callable[[Tensor], Tensor],
    hidden: Tensor,
    batch: PackedBatch,
    draft_outputs: DraftOutputs,
    *,
    chunk_rows: int,
    with_metrics: bool = True,
) -> tuple[Tensor, DistillationMetrics]:
    """The mean KL from teacher to student, weighted by rows and draft tokens. `teach` makes logits
    of rows of `hidden`. Agreement and overlap are only computed `with_metrics`."""
    needs_grads = torch.is_grad_enabled()
    call = _LossCall(teach, hidden, batch, draft_outputs, chunk_rows, with_metrics, needs_grads)
    loss: Tensor = _Distilled.apply(call, *draft_outputs.states, *draft_outputs.lm_heads)  # type: ignore[no-untyped-call]
    return loss, call.metrics


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _LossCall, *tensors: Tensor) -> Tensor:
        num_draft_tokens = len(call.draft_outputs.states)
        device = call.hidden.device
        call.metrics = DistillationMetrics.zeros(num_draft_tokens, device)
        grads: list[Tensor] = []
        if call.needs_grads:
            grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]
        valid = [call.batch.loss_positions >= offset for offset in call.draft_outputs.offsets]
        totals = torch.stack([(call.batch.loss_weights * each).sum() for each in valid])
        whole = sum(call.draft_outputs.draft_weights)
        # Python floats: copying a tensor of weights to the device would synchronise with it.
        scales = torch.stack(
            [
                weight / whole / total.clamp_min(1e-9)
                for weight, total in zip(call.draft_outputs.draft_weights, totals, strict=True)
            ]
        )
        call.metrics.weight += totals
        for first in range(0, len(call.batch.loss_indices), call.chunk_rows):
            _chunk(call, slice(first, first + call.chunk_rows), scales, valid, tensors, grads)
        ctx.grads = grads
        return (call.metrics.kl * scales).sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        return (None, *(grad.mul_(outer[0]) for grad in grads))


def _chunk(
    call: _LossCall,
    part: slice,
    scales: Tensor,
    valid: Sequence[Tensor],
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> None:
    draft_outputs, rows = call.draft_outputs, call.batch.loss_indices[part]
    weights = call.batch.loss_weights[part]
    teacher_logits = _teacher_logits(call, rows)
    num_draft_tokens = len(draft_outputs.states)
    dtype = torch.bfloat16 if rows.is_cuda else torch.float32
    for draft_index, (state, offset) in enumerate(
        zip(draft_outputs.states, draft_outputs.offsets, strict=True)
    ):
        number = num_draft_tokens + draft_outputs.lm_head_of[draft_index]
        table = tensors[number].to(dtype)
        valid_weights = torch.where(valid[draft_index][part], weights, 0.0)
        origin = (rows - offset).clamp_min(0)
        picked = state[origin].to(dtype)
        draft_logits = picked @ table.T
        if call.with_metrics:
            _measure(call, draft_index, draft_logits, teacher_logits, valid_weights)
        divergences = teacher_logits.gradients_in_place(draft_logits)
        call.metrics.kl[draft_index] += (divergences * valid_weights).sum()
        if not grads:
            continue
        count = (valid_weights * scales[draft_index])[:, None]
        grads[draft_index].index_add_(0, origin, (draft_logits @ table).float() * count)
        grads[number].add_((draft_logits.T @ (picked * count).to(dtype)).float())


@dataclass(frozen=True, slots=True)
class _TeacherLogits:
    """The teacher on some rows: logits over the student's vocabulary, logsumexp over its own, the
    probability mass within the student's, and the argmax tokens."""

    logits: Tensor
    sums: Tensor
    mass: Tensor
    top_tokens: Tensor | None

    def probabilities(self) -> Tensor:
        return (self.logits.float() - self.sums[:, None]).exp_()

    def gradients_in_place(self, draft_logits: Tensor) -> Tensor:
        """Return each row's KL, and overwrite the logits with its gradient."""
        if draft_logits.is_cuda:
            from outrider.kernels.gpu.distillation import kl_gradient_in_place

            return kl_gradient_in_place(self.logits, self.sums, self.mass, draft_logits)
        draft_logprobs = torch.log_softmax(draft_logits, -1)
        teacher_logprobs = self.logits - self.sums[:, None]
        teacher_probs = teacher_logprobs.exp()
        divergences = (teacher_probs * (teacher_logprobs - draft_logprobs)).sum(-1)
        torch.sub(draft_logprobs.exp_().mul_(self.mass[:, None]), teacher_probs, out=draft_logits)
        return divergences


def _teacher_logits(call: _LossCall, rows: Tensor) -> _TeacherLogits:
    logits = call.teach(call.hidden[rows])
    top_tokens = logits.argmax(-1) if call.with_metrics else None
    sums = _log_sums(logits)
    vocabulary = call.draft_outputs.vocabulary
    if vocabulary is None:
        return _TeacherLogits(logits, sums, torch.ones_like(sums), top_tokens)
    logits = logits.index_select(1, vocabulary)
    return _TeacherLogits(logits, sums, (_log_sums(logits) - sums).exp(), top_tokens)


def _log_sums(logits: Tensor) -> Tensor:
    if logits.is_cuda:
        from outrider.kernels.gpu.distillation import log_sums

        return log_sums(logits)
    return torch.logsumexp(logits, -1)


def _measure(
    call: _LossCall,
    draft_index: int,
    logits: Tensor,
    teacher_logits: _TeacherLogits,
    valid_weights: Tensor,
) -> None:
    best = logits.argmax(-1)
    if call.draft_outputs.vocabulary is not None:
        best = call.draft_outputs.vocabulary[best]
    draft_probs = torch.softmax(logits, -1, dtype=torch.float32)
    overlap = torch.minimum(draft_probs, teacher_logits.probabilities()).sum(-1)
    call.metrics.agreement[draft_index] += (
        (best == teacher_logits.top_tokens) * valid_weights
    ).sum()
    call.metrics.overlap[draft_index] += (overlap * valid_weights).sum()
