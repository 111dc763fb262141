"""Attention within documents that are packed into rows, and over what a head fed itself.

Each place of a row sees its document up to itself (`key`, `value`), and further keys that are its
own alone (`own`): those of the steps that a head has gone on from that very place. On CUDA the
first part is a flash kernel over sequences of any lengths. Both parts share one softmax: its sum is
known before the backward pass, which the same kernel then computes with that sum in place of its
own.
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

Own = Sequence[tuple[Tensor, Tensor]]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    own: Own = (),
    window: int = 0,
) -> Tensor:
    """Queries [rows, length, heads, size] and keys and values of as many or fewer heads to the
    mixed values, shaped as the queries."""
    is_wide = 0 < window < documents.longest
    if query.is_cuda and not is_wide and _flash_works(query.device, query.dtype, query.shape[-1]):
        flat = [part for pair in own for part in pair]
        mixed: Tensor = _Flash.apply(documents, scale, query, key, value, *flat)  # type: ignore[no-untyped-call]
        return mixed
    return attend_plainly(query, key, value, documents, scale=scale, own=own, window=window)


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    own: Own = (),
    window: int = 0,
) -> Tensor:
    """What `attend` means, with the whole square of scores."""
    groups = query.shape[2] // key.shape[2]
    mask = documents.mask(window if window < documents.longest else 0)
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if not own:
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return mixed.transpose(1, 2)
    scores = [(q @ k.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)]
    own_values = []
    for own_key, own_value in own:
        k_own = own_key.repeat_interleave(groups, 2).transpose(1, 2)
        scores.append((q * k_own).sum(-1, keepdim=True) * scale)
        own_values.append(own_value.repeat_interleave(groups, 2).transpose(1, 2))
    shares = torch.softmax(torch.cat(scores, -1).float(), -1).to(v.dtype)
    length = k.shape[2]
    mixed = shares[..., :length] @ v
    for number, own_value in enumerate(own_values):
        mixed = mixed + shares[..., length + number, None] * own_value
    return mixed.transpose(1, 2)


class _Flash(torch.autograd.Function):
    """Tensors are [rows, length, heads, size]; own keys and values follow in pairs."""

    @staticmethod
    def forward(
        ctx: Any,
        documents: Documents,
        scale: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *own: Tensor,
    ) -> Tensor:
        q, k, v = (part.reshape(-1, *part.shape[2:]).contiguous() for part in (query, key, value))
        mixed, sums, *seeds = _kernel(q, k, v, documents, scale)
        if own:
            mixed, sums = _with_own(q, mixed, sums, own, scale)
        ctx.save_for_backward(q, k, v, mixed, sums, *seeds, *own)
        ctx.documents, ctx.scale, ctx.shapes = documents, scale, (query.shape, key.shape)
        shaped: Tensor = mixed.reshape(query.shape)
        return shaped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixed, sums, seed, unused, *own = ctx.saved_tensors
        documents, scale = ctx.documents, ctx.scale
        grad = grads[0].reshape(q.shape).to(q.dtype).contiguous()
        grad_q, grad_k, grad_v = _kernel_grads(
            grad, q, k, v, mixed, sums, documents, seed, unused, scale
        )
        of_own: list[Tensor] = []
        if own:
            grad_q, of_own = _own_grads(q, grad_q, grad, mixed, sums, own, scale)
        query_shape, key_shape = ctx.shapes
        shaped = (grad_q.reshape(query_shape), grad_k.reshape(key_shape), grad_v.reshape(key_shape))
        return (None, None, *shaped, *of_own)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float
) -> tuple[Tensor, ...]:
    """The mixture [tokens, heads, size], the logarithms of the softmax's sums [heads, tokens], and
    two that the way back wants."""
    span = (documents.bounds, documents.bounds, documents.longest, documents.longest)
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q, k, v, *span, 0.0, True, False, scale=scale
    )
    return found[:4]


def _kernel_grads(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    sums: Tensor,
    documents: Documents,
    seed: Tensor,
    unused: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values, by the sums given."""
    span = (documents.bounds, documents.bounds, documents.longest, documents.longest)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, mixed, sums, *span, 0.0, True, seed, unused, scale=scale
    )
    return found


def _flat(own: Sequence[Tensor], num_heads: int) -> list[Tensor]:
    """[tokens, heads, size] in float32, each head of keys for all queries that share it."""
    flat = [part.reshape(-1, *part.shape[2:]) for part in own]
    return [part.repeat_interleave(num_heads // part.shape[1], 1).float() for part in flat]


def _with_own(
    q: Tensor, mixed: Tensor, sums: Tensor, own: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """The mixture and the logarithm of the softmax's sum [heads, tokens] with own keys in it."""
    parts = _flat(own, q.shape[1])
    scores = [(q.float() * key).sum(-1) * scale for key in parts[::2]]  # [tokens, heads]
    before = sums[:, : len(q)].transpose(0, 1)
    total = torch.logsumexp(torch.stack([before, *scores]), 0)
    result = mixed.float() * (before - total).exp()[..., None]
    for score, value in zip(scores, parts[1::2], strict=True):
        result += (score - total).exp()[..., None] * value
    combined = sums.clone()
    combined[:, : len(q)] = total.transpose(0, 1)
    return result.to(mixed.dtype), combined


def _own_grads(
    q: Tensor,
    grad_q: Tensor,
    grad: Tensor,
    mixed: Tensor,
    sums: Tensor,
    own: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, list[Tensor]]:
    parts = _flat(own, q.shape[1])
    wide_grad, wide_q = grad.float(), q.float()
    total = sums[:, : len(q)].transpose(0, 1)
    spent = (wide_grad * mixed.float()).sum(-1)
    summed, found = grad_q.float(), []
    for number, (key, value) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        share = ((wide_q * key).sum(-1) * scale - total).exp()
        of_score = share * ((wide_grad * value).sum(-1) - spent) * scale
        summed = summed + of_score[..., None] * key
        for place, wide in enumerate((of_score[..., None] * wide_q, share[..., None] * wide_grad)):
            given = own[2 * number + place]
            heads = given.shape[2]
            folded = wide.reshape(len(q), heads, -1, wide.shape[-1]).sum(2)
            found.append(folded.reshape(given.shape).to(given.dtype))
    return summed.to(grad_q.dtype), found


@lru_cache(maxsize=16)
def _flash_works(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the kernel does here what it should; where not, it is done without."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        worst = flash_error(device, dtype, size)
    except RuntimeError as error:
        logger.warning("attention without the flash kernel, which fails here: %s", error)
        return False
    if worst > 0.05:
        logger.warning("attention without the flash kernel, which is off by %.2g here", worst)
    return worst <= 0.05


def flash_error(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Of the kernel's outputs and gradients beside the plain ones, on a small example."""
    numbers = torch.tensor([[0] * 5 + [1] * 27, [2] * 20 + [3] * 12], device=device)
    positions = torch.cat([torch.arange(n) for n in (5, 27, 20, 12)]).reshape(2, 32).to(device)
    bounds = torch.tensor([0, 5, 32, 52, 64], dtype=torch.int32, device=device)
    documents = Documents(bounds, 27, numbers, positions)
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(2, 32, heads, size, device=device, generator=generator)

    given = [random(heads) for heads in (4, 2, 2, 2, 2, 4)]
    found = []
    with torch.enable_grad():
        for kind in (dtype, torch.float32):
            q, k, v, own_k, own_v, weight = (
                part.to(dtype).to(kind).requires_grad_() for part in given
            )
            own = [(own_k, own_v)]
            if kind == torch.float32:
                out = attend_plainly(q, k, v, documents, scale=size**-0.5, own=own)
            else:
                flat = (q, k, v, own_k, own_v)
                out = _Flash.apply(documents, size**-0.5, *flat)  # type: ignore[no-untyped-call]
            grads = torch.autograd.grad((out * weight).sum(), [q, k, v, own_k, own_v])
            found.append([out, *grads])
    scale = max(float(plain.detach().abs().max()) for plain in found[1])
    return max(
        float((fast.float() - plain).detach().abs().max()) / scale
        for fast, plain in zip(*found, strict=True)
    )
