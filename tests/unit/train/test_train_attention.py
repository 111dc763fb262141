"""Attention over packed documents is that over each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.train import attention
from outrider.train.attention import attend_eager, flash_error
from outrider.train.packing import Documents, make_batch
from outrider.train.shards import TrainingRecord

SIZES = (5, 9, 2)


def packed() -> Documents:
    return make_batch(
        [[TrainingRecord(np.arange(n), 0, 0) for n in SIZES]], sum(SIZES), 0.0
    ).documents


def random(heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, sum(SIZES), heads, 8, generator=generator)


def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over one sequence [length, heads, size]."""
    q, k, v = (part.transpose(0, 1) for part in (query, key, value))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(0, 1)


def test_packed_documents_attend_as_each_would_alone() -> None:
    query, key, value = random(4, 0), random(2, 1), random(2, 2)
    found = attend_eager(query, key, value, packed(), scale=8**-0.5)[0]
    for part in (range(0, 5), range(5, 14), range(14, 16)):
        cut = slice(part.start, part.stop)
        torch.testing.assert_close(found[cut], alone(query[0, cut], key[0, cut], value[0, cut]))


def test_own_keys_are_seen_by_their_place_alone() -> None:
    query, key, value = random(4, 0), random(2, 1), random(2, 2)
    drafted = [(random(2, 3), random(2, 4)), (random(2, 5), random(2, 6))]
    found = attend_eager(query, key, value, packed(), scale=8**-0.5, drafted=drafted)[0]
    for at, first in ((3, 0), (9, 5), (15, 14)):
        keys = torch.cat([key[0, first : at + 1], *(pair[0][0, at : at + 1] for pair in drafted)])
        values = torch.cat(
            [value[0, first : at + 1], *(pair[1][0, at : at + 1] for pair in drafted)]
        )
        keys, values = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
        shares = torch.softmax(torch.einsum("hd,thd->ht", query[0, at], keys) * 8**-0.5, -1)
        torch.testing.assert_close(found[at], torch.einsum("ht,thd->hd", shares, values))


def kernel(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float
) -> tuple[Tensor, ...]:
    """What the flash kernel computes, in plain torch."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    scores = masked_scores(q, k, documents, scale)
    sums = scores.logsumexp(-1)
    none = torch.empty(0)
    return torch.einsum("hqk,khd->qhd", (scores - sums[..., None]).exp(), v), sums, none, none


def kernel_grads(
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
    """Its way back, which takes mixture and sums as they are given."""
    groups, shape = q.shape[1] // k.shape[1], (*k.shape[:2], -1, k.shape[2])
    wide_k, wide_v = (part.repeat_interleave(groups, 1) for part in (k, v))
    shares = (masked_scores(q, wide_k, documents, scale) - sums[..., None]).exp()
    spent = (grad * mixed).sum(-1).T[..., None]
    slopes = shares * (torch.einsum("qhd,khd->hqk", grad, wide_v) - spent) * scale
    of_keys = torch.einsum("hqk,qhd->khd", slopes, q).reshape(shape).sum(2)
    of_values = torch.einsum("hqk,qhd->khd", shares, grad).reshape(shape).sum(2)
    return torch.einsum("hqk,khd->qhd", slopes, wide_k), of_keys, of_values


def masked_scores(q: Tensor, k: Tensor, documents: Documents, scale: float) -> Tensor:
    numbers, positions = documents.document_ids.flatten(), documents.positions.flatten()
    sees = (numbers[:, None] == numbers) & (positions[:, None] >= positions)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~sees, -torch.inf)


def test_one_softmax_over_both_parts_has_the_gradients_of_its_meaning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever computes the first part: here it is torch in the kernel's place."""
    monkeypatch.setattr(attention, "_flash_forward", kernel)
    monkeypatch.setattr(attention, "_flash_backward", kernel_grads)
    assert flash_error(torch.device("cpu"), torch.float64, 8) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_the_flash_kernel_agrees_with_its_meaning_in_outputs_and_gradients(size: int) -> None:
    assert flash_error(torch.device("cuda"), torch.bfloat16, size) < 0.02
