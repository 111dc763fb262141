"""Log-probabilities on the device, against those of the host."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS
from torch import Tensor

from outrider.kernels.gpu.logprobs import (
    LogprobColumn,
    keep_logits,
    logprob_width,
    report_logprobs,
)
from outrider.scheduler.types import TokenLogprobs
from outrider.workers.sampling.logprobs import token_logprobs

pytestmark = GPU_MARKS

MOST_TOP = 50
UNTOUCHED = -77


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_logits(num_rows: int, vocab: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab, generator=generator) * 4).to(DEVICE)


def report(
    logits: Tensor, tokens: Sequence[int], rows: Sequence[int], num_top: Sequence[int]
) -> Tensor:
    kept = torch.full((len(rows), logits.shape[1]), torch.nan, device=DEVICE)
    out = int32([UNTOUCHED]).repeat(len(rows), logprob_width(MOST_TOP))
    keep_logits(logits, int32(rows), int32(num_top), kept)
    report_logprobs(kept, int32(tokens), int32(rows), int32(num_top), out)
    return out.cpu()


def as_host_tells(out: Tensor, token: int, num_top: int, vocab: int) -> TokenLogprobs:
    floats = out.view(torch.float32)
    places = [LogprobColumn.TOP + 2 * i for i in range(min(num_top, vocab))]
    return TokenLogprobs(
        token,
        float(floats[LogprobColumn.LOGPROB]),
        int(out[LogprobColumn.RANK]),
        tuple((int(out[at]), float(floats[at + 1])) for at in places),
    )


def assert_close(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert found.token_id == expected.token_id and found.rank == expected.rank
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    for (_, one), (_, other) in zip(found.top, expected.top, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("vocab", [5, 37, 2048, 5001])
def test_values_ranks_and_best_tokens_are_those_of_the_host(vocab: int) -> None:
    num_top = [0, 3, 50, 1]
    rows = [2, 0, 1, 3, 2]
    logits = random_logits(len(rows), vocab)
    tokens = [vocab - 1, 0, vocab // 2, int(logits[3].argmax()), 1]
    out = report(logits, tokens, rows, num_top)
    counts = [num_top[row] for row in rows]
    expected = token_logprobs(logits, tokens, counts)
    for own, token, top, each in zip(out, tokens, counts, expected, strict=True):
        assert_close(as_host_tells(own, token, top, vocab), each)


def test_equals_go_by_id_also_across_parts_and_signs_of_zero() -> None:
    logits = torch.zeros(3, 4100, device=DEVICE)
    logits[0, 1::2] = -0.0
    logits[1, [7, 2049, 4099]] = 2.5
    logits[2] = -3.0
    tokens = [4099, 4099, 2048]
    out = report(logits, tokens, [0, 0, 0], [6])
    for own, token, each in zip(out, tokens, token_logprobs(logits, tokens, 6), strict=True):
        assert_close(as_host_tells(own, token, 6, 4100), each)


def test_tokens_that_cannot_be_have_no_mass_and_come_last() -> None:
    logits = random_logits(1, 4200)
    logits[0, 2000:] = -torch.inf  # a whole part of them
    out = report(logits, [5], [0], [4])
    assert_close(as_host_tells(out[0], 5, 4, 4200), token_logprobs(logits, [5], 4)[0])


def test_rows_that_want_nothing_and_padding_are_left_alone() -> None:
    logits = random_logits(4, 300)
    kept = torch.full_like(logits, torch.nan)
    rows, num_top = int32([1, -1, 0, 1]), int32([-1, 2])
    keep_logits(logits, rows, num_top, kept)
    assert torch.equal(kept[[0, 3]], logits[[0, 3]])
    assert bool(kept[[1, 2]].isnan().all())
    out = int32([UNTOUCHED]).repeat(4, logprob_width(MOST_TOP))
    report_logprobs(kept, int32([1, -1, 1, 1]), rows, num_top, out)
    assert bool((out[[1, 2]] == UNTOUCHED).all())
    assert bool((out[[0, 3], LogprobColumn.TOP + 4 :] == UNTOUCHED).all())
    assert bool((out[[0, 3], : LogprobColumn.TOP + 4] != UNTOUCHED).all())


def test_what_is_kept_stays_as_it_was_when_logits_are_changed_in_place() -> None:
    """And logits may be the first columns of wider rows."""
    wide = random_logits(2, 333)
    logits, before = wide[:, :300], wide[:, :300].clone()
    kept = torch.zeros(2, 300, device=DEVICE)
    keep_logits(logits, int32([0, 1]), int32([1, 1]), kept)
    logits.fill_(-torch.inf)
    assert torch.equal(kept, before)
