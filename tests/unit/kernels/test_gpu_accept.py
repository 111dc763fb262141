"""Acceptance on the device: the drafts that are the target's own choices, and one token more."""

from __future__ import annotations

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS, HAS_CUDA
from torch import Tensor

from outrider.catalog.proposers import DRAFT, kv_rule_of
from outrider.kernels.gpu.accept import OutcomeColumn, TextTable, accept_drafts, outcome_width
from outrider.scheduler.proposers import KvRule

pytestmark = GPU_MARKS

NUM_ROWS, MAX_LEN = 9, 40
DRAFT_RULE = kv_rule_of(DRAFT)
UNTOUCHED = -99


def a_text(max_depth: int, generator: torch.Generator, vocab: int = 3) -> TextTable:
    """Few different tokens, so that drafts stand for a while; text that fills its room or not."""

    def random(low: int, high: int, *shape: int) -> Tensor:
        values = torch.randint(low, high, shape, generator=generator, dtype=torch.int32)
        return values.to(DEVICE)

    text = TextTable.create(NUM_ROWS, MAX_LEN, max_depth, DEVICE)
    text.tokens.fill_(UNTOUCHED)
    text.lengths.copy_(random(1, MAX_LEN, NUM_ROWS))
    text.drafts.copy_(random(0, vocab, NUM_ROWS, max_depth))
    text.draft_computed.copy_(random(0, MAX_LEN, NUM_ROWS))
    return text


def copy_of(text: TextTable) -> TextTable:
    return TextTable(
        text.tokens.clone(), text.lengths.clone(), text.drafts.clone(), text.draft_computed.clone()
    )


def accept_by_hand(
    chosen: Tensor,
    first_logit: Tensor,
    depths: Tensor,
    drafted: Tensor,
    rows: Tensor,
    text: TextTable,
    out: Tensor,
    kv_rule: KvRule | None,
) -> None:
    """The rule in Python, one token after the other."""
    columns = (first_logit, depths, drafted, rows)
    sampled = zip(*(column.tolist() for column in columns), strict=True)
    for index, (first, depth, num_drafted, row) in enumerate(sampled):
        if depth < 0:
            continue
        length = int(text.lengths[row])
        own = chosen[first : first + depth + 1].tolist()
        drafts = text.drafts[row, :depth].tolist()
        num_accepted = 0
        while num_accepted < depth and drafts[num_accepted] == own[num_accepted]:
            num_accepted += 1
        new = own[: num_accepted + 1]
        for i, token in enumerate(new):
            if length + i < MAX_LEN:
                text.tokens[row, length + i] = token
        text.lengths[row] = length + len(new)
        if num_drafted > 0 and kv_rule is not None:
            computed = int(text.draft_computed[row])
            text.draft_computed[row] = kv_rule(
                computed, length - computed, num_drafted, num_accepted, length
            )
        out[index] = -1
        out[index, : OutcomeColumn.TOKENS] = torch.tensor([length, depth, num_accepted])
        for i, token in enumerate(new):
            out[index, OutcomeColumn.TOKENS + i] = token


def a_pass(
    max_depth: int, depths: list[int], generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choices, and for each sampled row its first logit row, depth, what was drafted for it (some
    is not verified, some by a proposer without KV) and its row of the text."""
    num_logits, first_logit = 2, []  # those of other rows come first
    for depth in depths:
        first_logit.append(num_logits if depth >= 0 else -1)
        num_logits += depth + 1
    chosen = torch.randint(0, 3, (num_logits,), generator=generator).to(DEVICE, dtype)
    rows = torch.randperm(NUM_ROWS, generator=generator)[: len(depths)]
    rows[torch.tensor(depths) < 0] = -1
    drafted = []
    for depth in depths:
        reach = int(torch.randint(max(depth, 0), max_depth + 1, (), generator=generator))
        drafted.append(reach if torch.rand((), generator=generator) < 0.8 else 0)
    columns = (torch.tensor(each, dtype=torch.int32) for each in (first_logit, depths, drafted))
    first, deep, reaches = (column.to(DEVICE) for column in columns)
    return chosen, first, deep, reaches, rows.to(DEVICE, torch.int32)


def assert_same_text(one: TextTable, other: TextTable) -> None:
    for name in ("tokens", "lengths", "drafts", "draft_computed"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("max_depth", [1, 2, 5, 8])
def test_text_and_report_are_those_of_the_rule(max_depth: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(max_depth)
    for _ in range(6):
        depths = torch.randint(-1, max_depth + 1, (7,), generator=generator).tolist()
        given = a_pass(max_depth, depths, generator, dtype)
        text = a_text(max_depth, generator)
        expected = copy_of(text)
        shape = (len(depths), outcome_width(max_depth))
        out = torch.full(shape, UNTOUCHED, dtype=torch.int32, device=DEVICE)
        expected_out = out.clone()
        accept_drafts(*given, text, out, DRAFT_RULE)
        accept_by_hand(*given, expected, expected_out, DRAFT_RULE)
        assert_same_text(text, expected)
        assert torch.equal(out, expected_out)


def _one_pass_rule(computed: int, fed: int, drafted: int, accepted: int, base_len: int) -> int:
    """Of a proposer that computes the text only, and but half of what it lacked."""
    return min(computed + max(fed, 0) // 2, base_len)


@pytest.mark.parametrize("kv_rule", [_one_pass_rule, None], ids=["another", "none"])
def test_a_proposer_keeps_the_kv_that_its_own_rule_says(kv_rule: KvRule | None) -> None:
    generator = torch.Generator().manual_seed(5)
    given = a_pass(4, [4, 0, -1, 2, 3], generator, torch.int32)
    text = a_text(4, generator)
    expected = copy_of(text)
    out = torch.full((5, outcome_width(4)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    expected_out = out.clone()
    accept_drafts(*given, text, out, kv_rule)
    accept_by_hand(*given, expected, expected_out, kv_rule)
    assert_same_text(text, expected)
    assert torch.equal(out, expected_out)


@pytest.mark.parametrize("num_right", [0, 1, 3, 4])
def test_drafts_stand_up_to_the_first_wrong_one(num_right: int) -> None:
    text = TextTable.create(2, MAX_LEN, 4, DEVICE)
    text.lengths[1] = 10
    text.drafts[1] = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    # What comes behind a wrong draft is right again, to no avail.
    right = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32)
    chosen = right.clone()
    if num_right < 4:
        chosen[num_right] = 77
    one = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    out = torch.full((1, outcome_width(4)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    accept_drafts(chosen.to(DEVICE), one - 1, one * 4, one * 4, one, text, out, DRAFT_RULE)
    new = [*range(5, 5 + num_right), 77 if num_right < 4 else 9]
    assert out[0].tolist() == [10, 4, num_right, *new, *[-1] * (5 - len(new))]
    assert text.tokens[1, 10 : 10 + len(new)].tolist() == new
    assert text.lengths.tolist() == [0, 10 + len(new)]
    assert text.draft_computed.tolist() == [0, 10 + min(num_right, 3)]


def test_where_no_token_could_be_chosen_the_text_has_one_that_exists() -> None:
    text = TextTable.create(2, MAX_LEN, 4, DEVICE)
    text.lengths[1] = 10
    text.drafts[1] = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    text.tokens.fill_(UNTOUCHED)
    chosen = torch.tensor([5, -1, 7, 8, 9], dtype=torch.int32, device=DEVICE)
    one = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    out = torch.full((1, outcome_width(4)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    accept_drafts(chosen, one - 1, one * 4, one * 4, one, text, out)
    assert out[0].tolist() == [10, 4, 1, 5, -1, -1, -1, -1]
    assert text.tokens[1, 10:13].tolist() == [5, 0, UNTOUCHED]


@pytest.mark.parametrize("num_verified", [0, 1, 2, 3])
def test_a_draft_keeps_what_it_computed_of_guesses_that_were_not_all_verified(
    num_verified: int,
) -> None:
    """Its fourth guess it has not computed; those before it stand as far as they were verified."""
    text = TextTable.create(2, MAX_LEN, 4, DEVICE)
    text.lengths[1] = 10
    text.drafts[1] = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    one = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    chosen = torch.tensor([5, 6, 7, 8], dtype=torch.int32, device=DEVICE)
    out = torch.full((1, outcome_width(4)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    accept_drafts(chosen, one - 1, one * num_verified, one * 4, one, text, out, DRAFT_RULE)
    assert out[0, : OutcomeColumn.TOKENS].tolist() == [10, num_verified, num_verified]
    assert text.lengths.tolist() == [0, 10 + num_verified + 1]
    assert text.draft_computed.tolist() == [0, 10 + num_verified]


def test_without_drafts_one_token_is_committed_and_the_draft_has_computed_nothing() -> None:
    text = a_text(3, torch.Generator().manual_seed(0))
    expected = copy_of(text)
    row = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    zero = torch.zeros_like(row)
    out = torch.full((1, outcome_width(3)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    accept_drafts(torch.tensor([31], device=DEVICE), zero, zero, zero, row, text, out)
    length = int(expected.lengths[4])
    expected.tokens[4, length] = 31
    expected.lengths[4] += 1
    assert_same_text(text, expected)
    assert out[0].tolist() == [length, 0, 0, 31, -1, -1, -1]


def test_tokens_beyond_the_room_are_reported_but_not_written() -> None:
    text = TextTable.create(2, MAX_LEN, 3, DEVICE)
    text.lengths[0] = MAX_LEN - 2
    text.drafts[0] = torch.tensor([1, 2, 3], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.empty(1, outcome_width(3), dtype=torch.int32, device=DEVICE)
    chosen, three = torch.tensor([1, 2, 3, 4], device=DEVICE), zero + 3
    accept_drafts(chosen, zero, three, three, zero, text, out)
    assert text.tokens[0, -2:].tolist() == [1, 2]
    assert text.tokens[1].tolist() == [0] * MAX_LEN
    assert out[0].tolist() == [MAX_LEN - 2, 3, 3, 1, 2, 3, 4]


def test_no_sampled_rows_are_no_work() -> None:
    text = a_text(2, torch.Generator().manual_seed(1))
    expected = copy_of(text)
    nothing = torch.empty(0, dtype=torch.int32, device=DEVICE)
    accept_drafts(nothing, nothing, nothing, nothing, nothing, text, nothing.view(0, 1))
    assert_same_text(text, expected)


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_a_recorded_acceptance_goes_on_from_where_the_text_is() -> None:
    generator = torch.Generator().manual_seed(2)
    given = a_pass(3, [3, 0, -1, 2], generator, torch.int32)
    text = a_text(3, generator)
    text.lengths.fill_(5)
    out = torch.full((4, outcome_width(3)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    expected, expected_out = copy_of(text), out.clone()
    accept_drafts(*given, copy_of(text), out.clone(), DRAFT_RULE)  # compiled before it is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accept_drafts(*given, text, out, DRAFT_RULE)
    for _ in range(3):
        given[0].copy_(torch.randint(0, 3, given[0].shape, generator=generator))
        graph.replay()
        accept_by_hand(*given, expected, expected_out, DRAFT_RULE)
        assert_same_text(text, expected)
        assert torch.equal(out, expected_out)
