"""What a draft would have guessed, compared with the text on the device, against plain loops."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS

from outrider.kernels.gpu.accept import TextTable
from outrider.kernels.gpu.agreement import settle_catch_up

pytestmark = GPU_MARKS

ROWS, MAX_LEN, NOBODYS = 6, 90, -7


def _tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("seed", range(3))
def test_guesses_are_compared_with_the_text_as_far_as_it_goes(seed: int) -> None:
    """Some rows guess nothing; of one the text is as long as it may be, and ends in the pass."""
    rng = random.Random(seed)
    text = TextTable.create(ROWS, MAX_LEN, 1, DEVICE)
    tokens = [[rng.randrange(3) for _ in range(MAX_LEN)] for _ in range(ROWS)]
    lengths = [MAX_LEN + 1, *(rng.randrange(50, MAX_LEN) for _ in range(ROWS - 1))]
    text.tokens.copy_(_tensor(tokens))
    text.lengths.copy_(_tensor(lengths))
    entries, guesses, expected = [], list[int](), list[int]()
    computed = [0] * ROWS
    for row in rng.sample(range(ROWS), ROWS - 1):
        count = rng.choice([1, 5, 40])
        end = min(lengths[row], MAX_LEN) - rng.choice([0, 0, 3])
        depth = rng.choice([count - 1, count - 1, -1])
        entries.append((row, count, end - count, depth, 0, 0, len(guesses), 0))
        computed[row] = end
        for position in range(end - depth, end + 1):
            guesses.append(rng.randrange(3))
            is_known = position < min(lengths[row], MAX_LEN)
            expected.append(int(guesses[-1] == tokens[row][position]) if is_known else -1)
    hits = torch.full((len(guesses) + 1,), NOBODYS, dtype=torch.int32, device=DEVICE)
    plan = _tensor([*entries, (0,) * 8]).T.contiguous()
    totals = _tensor([0, 0, len(guesses), len(entries), -1, 1])
    settle_catch_up(plan, totals, _tensor([*guesses, 0]), text, hits)
    assert hits.tolist() == [*expected, NOBODYS]
    assert text.draft_computed.tolist() == computed
