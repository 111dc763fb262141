"""Bias, penalties and bans on the device: the scores that sampling on the host gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from gpu_tools import DEVICE, GPU_MARKS
from sampling_tools import make_sampler
from torch import Tensor

from outrider.kernels.gpu import adjust
from outrider.kernels.gpu.accept import accept_drafts, outcome_width
from outrider.kernels.gpu.adjust import adjust_logits, count_tokens
from outrider.kernels.gpu.columns import Mark
from outrider.kernels.gpu.sampling import choose_tokens
from outrider.kernels.reference import ReferenceOps
from outrider.workers.gpu.adjustments import RowAdjustment
from outrider.workers.gpu.state import DeviceRows
from outrider.workers.sampling import chain
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler, last_rows, logit_rows

pytestmark = GPU_MARKS

NUM_ROWS, MAX_LEN, MAX_DEPTH = 16, 64, 4
PROMPT_LEN = 9
# Ids of 40 and above are beyond the smallest vocabulary here.
BIAS = {0: 3.5, 5: -100.0, 7: 0.1, 11: -0.3, 40: 9.0, 2000: 1.0}
KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.3},
    {"frequency_penalty": 0.7, "presence_penalty": -1.1},
    {"presence_penalty": 1.9},
    {"logit_bias": BIAS},
    {"logit_bias": {token: token / 7 for token in range(37)}, "repetition_penalty": 1.1},
    {"min_tokens": 2, "stop_ids": (1, 5, 1999)},
    {"min_tokens": 16, "stop_ids": (1, 5), "logit_bias": BIAS, "frequency_penalty": -0.2},
    {"allowed_token_ids": [2, 3, 30, 2400]},
    {"allowed_token_ids": [2, 3], "min_tokens": 2, "stop_ids": (2,), "presence_penalty": 0.4},
    {"bad_word_ids": ((4,), (6,)), "logit_bias": BIAS},
    # Together the bans would leave nothing before the third token; from there on they do.
    {
        "allowed_token_ids": [2, 3],
        "min_tokens": 2,
        "stop_ids": (2,),
        "bad_word_ids": ((3,),),
    },
]


class Requests(NamedTuple):
    """Rows with texts and drafts, and what the device knows of them."""

    device: DeviceRows
    rows: list[int]
    spans: list[LogitSpan]


def a_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_ids(count: int, vocab: int, generator: torch.Generator) -> list[int]:
    """Mostly the same few, so that they repeat."""
    ids = torch.randint(0, min(vocab, 12), (count,), generator=generator)
    rare = torch.randint(0, vocab, (count,), generator=generator)
    is_rare = torch.rand(count, generator=generator) < 0.3
    return torch.where(is_rare, rare, ids).tolist()


def device_rows(vocab: int) -> DeviceRows:
    return DeviceRows(NUM_ROWS, MAX_LEN, MAX_DEPTH, 8, vocab, DEVICE)


def begin(device: DeviceRows, row: int, sampler: RowSampler, tokens: Sequence[int]) -> None:
    device.set_text(row, tokens, 0)
    device.set_adjustment(
        row, RowAdjustment.of(sampler, tokens) if sampler.changes_logits else None
    )


def some_requests(vocab: int, kinds: Sequence[dict[str, Any]], seed: int = 0) -> Requests:
    """One of each kind, with outputs and drafts of any length."""
    generator = a_generator(seed)
    device = device_rows(vocab)
    rows = torch.randperm(NUM_ROWS, generator=generator)[: len(kinds)].tolist()
    spans = []
    for row, kind in zip(rows, kinds, strict=True):
        num_output, depth = torch.randint(0, MAX_DEPTH + 1, (2,), generator=generator).tolist()
        tokens = some_ids(PROMPT_LEN + num_output, vocab, generator)
        drafts = some_ids(depth, vocab, generator)
        sampler = make_sampler(vocab, prompt_len=PROMPT_LEN, **kind)
        begin(device, row, sampler, tokens)
        device.text.drafts[row, :depth] = torch.tensor(drafts, dtype=torch.int32)
        spans.append(LogitSpan(sampler, tokens, drafts))
    return Requests(device, rows, spans)


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def adjusted(logits: Tensor, device: DeviceRows, rows: list[int], positions: list[int]) -> Tensor:
    """On the device, from a part of wider rows, which must stay as they are beside it."""
    wide = torch.full((len(logits), logits.shape[1] + 3), 7.0, device=DEVICE)
    own = wide[:, :-3]
    own.copy_(logits)
    text = device.text
    adjust_logits(own, device.adjustments, int32(rows), int32(positions), text.lengths, text.drafts)
    assert bool((wide[:, -3:] == 7.0).all())
    return own.cpu()


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("vocab", [37, 1024, 2501])
def test_scores_are_those_of_the_host_bit_for_bit(vocab: int, seed: int) -> None:
    device, rows, spans = some_requests(vocab, KINDS, seed)
    of_logits = logit_rows(spans)
    logits = torch.randn(len(of_logits), vocab, generator=a_generator(seed)) * 5
    expected = chain.adjust(logits, of_logits)
    row_of = dict(zip(map(id, spans), rows, strict=True))
    own_rows = [row_of[id(logit.span)] for logit in of_logits]
    found = adjusted(logits, device, own_rows, [logit.position for logit in of_logits])
    assert_same_bits(found, expected)
    assert not torch.equal(found, logits)


def test_a_program_may_take_all_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    device, rows, spans = some_requests(2501, KINDS)
    logits = torch.randn(len(rows), 2501, generator=a_generator())
    positions = [span.base_len for span in spans]
    shared = adjusted(logits, device, rows, positions)
    monkeypatch.setattr(adjust, "_PROGRAMS", 1)
    assert_same_bits(adjusted(logits, device, rows, positions), shared)


def test_rows_that_ask_for_nothing_and_padding_stay_as_they_are() -> None:
    device, rows, spans = some_requests(70, [{}, {"repetition_penalty": 2.0}, {}])
    strange = torch.tensor([1.5, -0.0, float("inf"), float("-inf"), float("nan")]).repeat(14)
    found = adjusted(strange.expand(4, -1), device, [*rows, -1], [*(s.base_len for s in spans), 0])
    for at in (0, 2, 3):
        assert_same_bits(found[at], strange)
    assert not torch.equal(found[1].view(torch.int32), strange.view(torch.int32))


def test_positions_of_an_earlier_pass_lead_nowhere_beyond_the_drafts() -> None:
    device, [row], [span] = some_requests(70, [{"frequency_penalty": 1.0}])
    logits = torch.randn(2, 70, generator=a_generator())
    found = adjusted(logits, device, [row, row], [span.base_len - 5, span.base_len + 1000])
    undrafted = chain.adjust(logits[:1], last_rows([LogitSpan(span.sampler, span.tokens)]))
    assert_same_bits(found[:1], undrafted)
    # As many as the table holds, whatever they are.
    drafts = device.text.drafts[row].tolist()
    drafted = chain.adjust(logits[1:], last_rows([LogitSpan(span.sampler, span.tokens, drafts)]))
    assert_same_bits(found[1:], drafted)


def test_a_draft_may_lack_ids_of_the_target() -> None:
    """Its logits are fewer, and texts hold ids it has no logit for."""
    device, rows, spans = some_requests(2501, KINDS)
    logits = torch.randn(len(rows), 100, generator=a_generator())
    fewer = [
        LogitSpan(make_sampler(100, prompt_len=PROMPT_LEN, **kind), span.tokens, span.drafts)
        for kind, span in zip(KINDS, spans, strict=True)
    ]
    of_logits = last_rows(fewer)
    found = adjusted(logits, device, rows, [logit.position for logit in of_logits])
    assert_same_bits(found, chain.adjust(logits, of_logits))


def test_counts_follow_the_texts() -> None:
    """Through rounds of acceptance on the device and steps on the host."""
    vocab, generator = 12, a_generator()
    kinds: list[dict[str, Any]] = [
        {"frequency_penalty": 0.5},
        {},
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}},
    ]
    device, rows, spans = some_requests(vocab, kinds)
    texts = {row: list(span.tokens) for row, span in zip(rows, spans, strict=True)}
    for _ in range(5):
        depths = torch.randint(0, MAX_DEPTH + 1, (len(rows),), generator=generator).tolist()
        depths[int(torch.randint(len(rows), (1,), generator=generator))] = -1  # computes a prompt
        drafts = torch.randint(0, 2, device.text.drafts.shape, generator=generator)
        device.text.drafts.copy_(drafts)
        chosen = torch.randint(0, 2, (len(rows) * (MAX_DEPTH + 1),), generator=generator)
        first = int32([at * (MAX_DEPTH + 1) for at in range(len(rows))])
        outcomes = torch.full((NUM_ROWS, outcome_width(MAX_DEPTH)), 5).to(DEVICE, torch.int32)
        numbers = [row if depth >= 0 else -1 for row, depth in zip(rows, depths, strict=True)]
        plan = int32(depths), int32(numbers)
        chosen = chosen.to(DEVICE, torch.int32)
        accept_drafts(chosen, first, plan[0], *plan, device.text, outcomes)
        count_tokens(outcomes, *plan, device.adjustments)
        for row, tokens in texts.items():
            tokens[:] = device.text.tokens[row, : int(device.text.lengths[row])].tolist()
            device.extend_text(row, len(tokens), [7, 7], 0)
            tokens += [7, 7]
    assert min(map(len, texts.values())) > PROMPT_LEN + 12
    for row, span in zip(rows, spans, strict=True):
        marks = device.adjustments.marks[row].cpu()
        if span.sampler.changes_logits:
            assert torch.equal(marks, RowAdjustment.of(span.sampler, texts[row]).marks)
        else:
            assert not marks.any(), "the counts of a row without adjustments are not read"


def test_a_row_keeps_nothing_of_who_had_it_before() -> None:
    vocab, row = 50, 3
    device = device_rows(vocab)
    logits = torch.randn(1, vocab, generator=a_generator())
    for kind in (*KINDS, *reversed(KINDS)):
        sampler = make_sampler(vocab, prompt_len=2, **kind)
        tokens = some_ids(6, vocab, a_generator(len(kind)))
        begin(device, row, sampler, tokens)
        expected = chain.adjust(logits, last_rows([LogitSpan(sampler, tokens)]))
        assert_same_bits(adjusted(logits, device, [row], [len(tokens)]), expected)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9}])
def test_whole_parts_of_the_vocabulary_may_be_barred(filters: dict[str, Any]) -> None:
    """And all of it to a draft that lacks what is allowed: it guesses any token."""
    vocab, row = 5000, 2
    sampler = make_sampler(
        vocab, prompt_len=1, temperature=0.9, allowed_token_ids=[4321, 4567], **filters
    )
    device = device_rows(vocab)
    begin(device, row, sampler, [0])
    device.set_sampling(row, sampler)
    logits = torch.randn(1, vocab, generator=a_generator())
    for width, allowed in ((vocab, None), (300, range(300))):
        own = logits[:, :width].to(DEVICE)
        is_draft = allowed is not None  # and drafts are written at the places of their rows
        place, position, chosen = (
            int32([row]),
            int32([1]),
            int32([-1] * (row + 1 if is_draft else 1)),
        )
        text = device.text
        adjust_logits(own, device.adjustments, place, position, text.lengths, text.drafts)
        choose_tokens(own, device.settings, place, position, chosen, by_row=is_draft)
        if allowed is None:
            assert (
                chosen.tolist()
                == sample(logits, [LogitSpan(sampler, [0])], ReferenceOps()).tolist()
            )
        else:
            assert int(chosen[row]) in allowed


def test_as_many_biases_as_fit() -> None:
    vocab = Mark.MAX_BIASES + 10
    bias = {token: float(token % 13 - 6) for token in range(5, 5 + Mark.MAX_BIASES)}
    sampler = make_sampler(vocab, prompt_len=1, logit_bias=bias)
    device = device_rows(vocab)
    begin(device, 0, sampler, [0])
    logits = torch.randn(1, vocab, generator=a_generator())
    expected = chain.adjust(logits, last_rows([LogitSpan(sampler, [0])]))
    assert_same_bits(adjusted(logits, device, [0], [1]), expected)
