"""Causal attention within packed documents, and over the draft steps of an unrolled head.

Each position attends to its document up to itself (`key`, `value`) and to further keys of its own
(`drafted`): those of the draft steps unrolled from it. On CUDA the first part is a variable-length
flash kernel. Both parts share one softmax: its logsumexp is merged after the forward pass, and the
kernel's backward pass runs with the merged one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.train.packing import Documents

logger = logging.getLogger(__name__)

DraftedKv = Sequence[tuple[Tensor, Tensor]]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    drafted: DraftedKv = (),
    window: int = 0,
) -> Tensor:
    """Attention output, shaped as the queries [rows, length, heads, size]; keys and values may
    have fewer heads."""
    is_wide = 0 < window < documents.max_seqlen
    if query.is_cuda and not is_wide and _flash_works(query.device, query.dtype, query.shape[-1]):
        flat = [part for pair in drafted for part in pair]
        mixed: Tensor = _Flash.apply(documents, scale, query, key, value, *flat)  # type: ignore[no-untyped-call]
        return mixed
    return attend_eager(query, key, value, documents, scale=scale, drafted=drafted, window=window)


def attend_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    drafted: DraftedKv = (),
    window: int = 0,
) -> Tensor:
    """The reference of `attend`, with all scores in memory."""
    groups = query.shape[2] // key.shape[2]
    mask = documents.mask(window if window < documents.max_seqlen else 0)
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if not drafted:
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return mixed.transpose(1, 2)
    scores = [(q @ k.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)]
    drafted_values = []
    for drafted_key, drafted_value in drafted:
        k_drafted = drafted_key.repeat_interleave(groups, 2).transpose(1, 2)
        scores.append((q * k_drafted).sum(-1, keepdim=True) * scale)
        drafted_values.append(drafted_value.repeat_interleave(groups, 2).transpose(1, 2))
    shares = torch.softmax(torch.cat(scores, -1).float(), -1).to(v.dtype)
    length = k.shape[2]
    mixed = shares[..., :length] @ v
    for number, drafted_value in enumerate(drafted_values):
        mixed = mixed + shares[..., length + number, None] * drafted_value
    return mixed.transpose(1, 2)


class _Flash(torch.autograd.Function):
    """Tensors are [rows, length, heads, size]; drafted keys and values follow in pairs."""

    @staticmethod
    def forward(
        ctx: Any,
        documents: Documents,
        scale: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *drafted: Tensor,
    ) -> Tensor:
        q, k, v = (part.reshape(-1, *part.shape[2:]).contiguous() for part in (query, key, value))
        mixed, lse, *rng_states = _flash_forward(q, k, v, documents, scale)
        if drafted:
            mixed, lse = _with_drafted(q, mixed, lse, drafted, scale)
        ctx.save_for_backward(q, k, v, mixed, lse, *rng_states, *drafted)
        ctx.documents, ctx.scale, ctx.shapes = documents, scale, (query.shape, key.shape)
        shaped: Tensor = mixed.reshape(query.shape)
        return shaped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixed, lse, rng_state, unused, *drafted = ctx.saved_tensors
        documents, scale = ctx.documents, ctx.scale
        grad = grads[0].reshape(q.shape).to(q.dtype).contiguous()
        grad_q, grad_k, grad_v = _flash_backward(
            grad, q, k, v, mixed, lse, documents, rng_state, unused, scale
        )
        drafted_grads: list[Tensor] = []
        if drafted:
            grad_q, drafted_grads = _drafted_grads(q, grad_q, grad, mixed, lse, drafted, scale)
        query_shape, key_shape = ctx.shapes
        shaped = (grad_q.reshape(query_shape), grad_k.reshape(key_shape), grad_v.reshape(key_shape))
        return (None, None, *shaped, *drafted_grads)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float
) -> tuple[Tensor, ...]:
    """The output [tokens, heads, size], the logsumexp [heads, tokens], and two tensors for the
    backward pass."""
    span = (documents.cu_seqlens, documents.cu_seqlens, documents.max_seqlen, documents.max_seqlen)
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q, k, v, *span, 0.0, True, False, scale=scale
    )
    return found[:4]


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    lse: Tensor,
    documents: Documents,
    rng_state: Tensor,
    unused: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, for a given logsumexp."""
    span = (documents.cu_seqlens, documents.cu_seqlens, documents.max_seqlen, documents.max_seqlen)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, mixed, lse, *span, 0.0, True, rng_state, unused, scale=scale
    )
    return found


def _flat(drafted: Sequence[Tensor], num_heads: int) -> list[Tensor]:
    """[tokens, heads, size] in float32, KV heads repeated for their query heads."""
    flat = [part.reshape(-1, *part.shape[2:]) for part in drafted]
    return [part.repeat_interleave(num_heads // part.shape[1], 1).float() for part in flat]


def _with_drafted(
    q: Tensor, mixed: Tensor, lse: Tensor, drafted: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp [heads, tokens] with the drafted keys merged in."""
    parts = _flat(drafted, q.shape[1])
    scores = [(q.float() * key).sum(-1) * scale for key in parts[::2]]  # [tokens, heads]
    before = lse[:, : len(q)].transpose(0, 1)
    total = torch.logsumexp(torch.stack([before, *scores]), 0)
    result = mixed.float() * (before - total).exp()[..., None]
    for score, value in zip(scores, parts[1::2], strict=True):
        result += (score - total).exp()[..., None] * value
    combined = lse.clone()
    combined[:, : len(q)] = total.transpose(0, 1)
    return result.to(mixed.dtype), combined


def _drafted_grads(
    q: Tensor,
    grad_q: Tensor,
    grad: Tensor,
    mixed: Tensor,
    lse: Tensor,
    drafted: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, list[Tensor]]:
    parts = _flat(drafted, q.shape[1])
    wide_grad, wide_q = grad.float(), q.float()
    total = lse[:, : len(q)].transpose(0, 1)
    spent = (wide_grad * mixed.float()).sum(-1)
    summed, found = grad_q.float(), []
    for number, (key, value) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        share = ((wide_q * key).sum(-1) * scale - total).exp()
        of_score = share * ((wide_grad * value).sum(-1) - spent) * scale
        summed = summed + of_score[..., None] * key
        for place, wide in enumerate((of_score[..., None] * wide_q, share[..., None] * wide_grad)):
            given = drafted[2 * number + place]
            heads = given.shape[2]
            folded = wide.reshape(len(q), heads, -1, wide.shape[-1]).sum(2)
            found.append(folded.reshape(given.shape).to(given.dtype))
    return summed.to(grad_q.dtype), found


@lru_cache(maxsize=16)
def _flash_works(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the kernel's results are right on this device."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        worst = flash_error(device, dtype, size)
    except RuntimeError as error:
        logger.warning(
            "the flash attention kernel fails on this device; running without it: %s", error
        )
        return False
    if worst > 0.05:
        logger.warning(
            "the flash attention kernel is off by %.2g on this device; running without it", worst
        )
    return worst <= 0.05


def flash_error(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Largest relative error of outputs and gradients against `attend_eager`, on a small case."""
    numbers = torch.tensor([[0] * 5 + [1] * 27, [2] * 20 + [3] * 12], device=device)
    positions = torch.cat([torch.arange(n) for n in (5, 27, 20, 12)]).reshape(2, 32).to(device)
    cu_seqlens = torch.tensor([0, 5, 32, 52, 64], dtype=torch.int32, device=device)
    documents = Documents(cu_seqlens, 27, numbers, positions)
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(2, 32, heads, size, device=device, generator=generator)

    given = [random(heads) for heads in (4, 2, 2, 2, 2, 4)]
    found = []
    with torch.enable_grad():
        for kind in (dtype, torch.float32):
            q, k, v, drafted_k, drafted_v, weight = (
                part.to(dtype).to(kind).requires_grad_() for part in given
            )
            drafted = [(drafted_k, drafted_v)]
            if kind == torch.float32:
                out = attend_eager(q, k, v, documents, scale=size**-0.5, drafted=drafted)
            else:
                flat = (q, k, v, drafted_k, drafted_v)
                out = _Flash.apply(documents, size**-0.5, *flat)  # type: ignore[no-untyped-call]
            grads = torch.autograd.grad((out * weight).sum(), [q, k, v, drafted_k, drafted_v])
            found.append([out, *grads])
    scale = max(float(plain.detach().abs().max()) for plain in found[1])
    return max(
        float((fast.float() - plain).detach().abs().max()) / scale
        for fast, plain in zip(*found, strict=True)
    )
