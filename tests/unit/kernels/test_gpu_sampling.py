"""Noise, argmax and filters on the device: the tokens that sampling on the host chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from gpu_tools import DEVICE, GPU_MARKS, HAS_CUDA
from sampling_tools import make_sampler
from torch import Tensor

from outrider.kernels import noise
from outrider.kernels.gpu import sampling
from outrider.kernels.gpu.filters import LIST_SLOTS, units_of
from outrider.kernels.gpu.noise import gumbel_of_bits, row_state, token_bits
from outrider.kernels.gpu.sampling import (
    SamplingTable,
    choose_tokens,
    gumbel_argmax,
    gumbel_max,
    probability_of,
)
from outrider.kernels.mass import UNIT_BITS, mass_in_units
from outrider.kernels.noise import NoiseStream
from outrider.kernels.reference import ReferenceOps
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.rows import LogitSpan, RowSampler

pytestmark = GPU_MARKS

NOISE_TOLERANCE = 1e-5
DECISION_MARGIN = 1e-4


@triton.jit
def bits_kernel(seeds_ptr, streams_ptr, positions_ptr, out_ptr, first_id, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    state = row_state(
        tl.load(seeds_ptr + row), tl.load(streams_ptr + row), tl.load(positions_ptr + row)
    )
    ids = tl.arange(0, WIDTH)
    tl.store(out_ptr + row * WIDTH + ids, token_bits(state, first_id + ids).to(tl.int64))


@triton.jit
def gumbel_kernel(bits_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < count, other=0).to(tl.uint32)
    tl.store(out_ptr + at, gumbel_of_bits(bits), mask=at < count)


def a_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_keys(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = a_generator(seed)
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    streams = torch.randint(0, 4, (num_rows,), generator=generator)
    positions = torch.randint(0, 100_000, (num_rows,), generator=generator)
    return seeds.to(DEVICE), streams.to(DEVICE), positions.to(DEVICE)


@pytest.mark.parametrize("first_id", [0, 77, 150_000])
def test_bits_are_those_of_the_reference(first_id: int) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF], device=DEVICE)
    streams = torch.tensor([0, 1, 2, 3, 0, 1], device=DEVICE)
    positions = torch.tensor([0, 1, 4095, 1 << 40, 7, 2**31 - 1], device=DEVICE)
    out = torch.full((6, 256), -1, dtype=torch.int64, device=DEVICE)
    bits_kernel[(6,)](seeds, streams, positions, out, first_id, WIDTH=256)
    assert torch.equal(out, noise.noise_bits(seeds, streams, positions, 256, first_id))


def test_gumbel_noise_is_finite_and_accurate_everywhere() -> None:
    powers = 2 ** torch.arange(32)
    quarters = torch.arange(5) * 2**30
    special = torch.cat([powers, powers - 1, quarters - 1, quarters, quarters + 1])
    chance = torch.randint(0, 2**32, (20_000,), generator=a_generator())
    bits = torch.cat([special, 2**32 - 1 - special, chance]).clamp(0, 2**32 - 1)
    out = torch.full((len(bits),), math.nan, device=DEVICE)
    gumbel_kernel[(triton.cdiv(len(bits), 4096),)](bits.to(DEVICE), out, len(bits), BLOCK=4096)
    u = (bits.double() + 0.5) * 2.0**-32
    expected = -(-torch.log1p(-u)).log()
    assert out.isfinite().all()
    assert (out.cpu().double() - expected).abs().max().item() < NOISE_TOLERANCE


@pytest.mark.parametrize(
    "num_rows, vocab", [(1, 1), (3, 5), (2, 2047), (2, 2048), (2, 2049), (3, 5000)]
)
@pytest.mark.parametrize("spread", [0.3, 8.0])
def test_the_best_score_with_noise_is_found(num_rows: int, vocab: int, spread: float) -> None:
    first_id = 1000 * num_rows
    scores = (torch.randn(num_rows, vocab, generator=a_generator(vocab)) * spread).to(DEVICE)
    keys = random_keys(num_rows, vocab)
    best, columns = gumbel_max(scores, *keys, first_id)
    noisy = scores.double() + noise.gumbel(*keys, vocab, first_id).double()
    highest = noisy.amax(-1)
    assert best.dtype == torch.float32 and columns.dtype == torch.int64
    assert (best.double() - highest).abs().max().item() < NOISE_TOLERANCE
    of_chosen = noisy.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
    assert (highest - of_chosen).max().item() < NOISE_TOLERANCE


def test_no_rows_are_no_work() -> None:
    nothing = torch.empty(0, 77, device=DEVICE)
    keys = random_keys(0)
    assert gumbel_argmax(nothing, *keys).shape == (0,)
    assert probability_of(nothing, keys[0]).shape == (0,)
    out = torch.empty(0, dtype=torch.int32, device=DEVICE)
    choose_tokens(nothing, SamplingTable.create(1, DEVICE), out, out, out)


def test_scores_may_be_half_precision_columns_of_wider_rows() -> None:
    wide = torch.full((3, 1600), 1e4, dtype=torch.float16, device=DEVICE)
    wide[:, :1500] = torch.randn(3, 1500, generator=a_generator(1)).to(DEVICE)
    keys = random_keys(3)
    for scores in (wide[:, :1500], wide[:, :1500].t().contiguous().t()):
        assert torch.equal(
            gumbel_argmax(scores, *keys), ReferenceOps().gumbel_argmax(scores, *keys)
        )


def test_equal_scores_go_to_the_lowest_id_and_minus_infinity_is_never_chosen() -> None:
    scores = torch.full((4, 3000), -math.inf, device=DEVICE)
    # Noise vanishes beside these, so they tie.
    for row, ties in enumerate(([700, 1500, 2999], [2048, 2047], [2500, 2501], [2999])):
        scores[row, ties] = 1e9
    keys = random_keys(4)
    assert gumbel_argmax(scores, *keys).tolist() == [700, 2047, 2500, 2999]
    # Noise tells nothing apart where every score is -inf.
    assert gumbel_argmax(torch.full_like(scores, -math.inf), *keys).tolist() == [0] * 4


def test_the_best_of_parts_is_bit_for_bit_the_best_of_the_whole() -> None:
    scores = torch.randn(5, 4000, generator=a_generator(2)).to(DEVICE)
    keys = random_keys(5)
    bounds = (0, 17, 2100, 4000)
    parts = [
        gumbel_max(scores[:, start:stop], *keys, start)
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    owners = torch.stack([best for best, _ in parts]).argmax(0).tolist()
    tokens = [int(parts[owner][1][row]) + bounds[owner] for row, owner in enumerate(owners)]
    best, columns = gumbel_max(scores, *keys, 0)
    assert tokens == columns.tolist()
    assert [float(parts[owner][0][row]) for row, owner in enumerate(owners)] == best.tolist()


@pytest.mark.parametrize("vocab", [1, 2048, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_probability_is_that_of_a_softmax(vocab: int, dtype: torch.dtype) -> None:
    scores = (torch.randn(4, vocab, generator=a_generator(vocab)) * 5).to(DEVICE, dtype)
    if vocab > 2100:
        scores[0, :2100] = -math.inf  # whole parts without any mass
    tokens = torch.tensor([vocab - 1, 0, vocab // 2, 0], device=DEVICE)
    out = probability_of(scores, tokens)
    expected = scores.double().softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-12)


class Case(NamedTuple):
    """Rows of logits with what each asks of the sampler, and its position."""

    logits: Tensor  # float32 [R, vocab], on the CPU
    samplers: list[RowSampler]
    positions: list[int]

    def on_host(self) -> list[int]:
        spans = [
            LogitSpan(sampler, [0] * position)
            for sampler, position in zip(self.samplers, self.positions, strict=True)
        ]
        chosen: list[int] = sample(self.logits, spans, ReferenceOps()).tolist()
        return chosen

    def on_device(self) -> tuple[list[int], Tensor]:
        """Tokens and confidences; the table's rows are in reverse, the logits' rows too wide."""
        num_rows, vocab = self.logits.shape
        table = SamplingTable.create(num_rows, DEVICE)
        for i, sampler in enumerate(self.samplers):
            set_sampler(table, num_rows - 1 - i, sampler)
        wide = torch.full((num_rows, vocab + 13), 1e9, device=DEVICE)
        wide[:, :vocab] = self.logits
        tokens = torch.full((num_rows,), -7, dtype=torch.int64, device=DEVICE)
        confidence = torch.full((num_rows,), math.nan, device=DEVICE)
        choose_tokens(
            wide[:, :vocab],
            table,
            torch.arange(num_rows, dtype=torch.int32, device=DEVICE).flip(0),
            torch.tensor(self.positions, dtype=torch.int32, device=DEVICE),
            tokens,
            confidence,
        )
        return tokens.tolist(), confidence.cpu()

    def is_close_call(self, row: int, one: int, other: int) -> bool:
        """Whether rounding may decide between two tokens: by noise, or at the edge of a filter."""
        sampler, vocab = self.samplers[row], self.logits.shape[1]
        scores = self.logits[row].double() / sampler.temperature
        seed, stream, position = (
            torch.tensor([k]) for k in (sampler.seed, NoiseStream.SHARED, self.positions[row])
        )
        noisy = scores + noise.gumbel(seed, stream, position, vocab)[0].double()
        if abs(float(noisy[one] - noisy[other])) < DECISION_MARGIN:
            return True
        order = torch.sort(scores, descending=True, stable=True).indices
        mass = (scores[order] - scores.max()).exp()
        is_left = scores[order] >= scores.max() + sampler.log_min_p
        is_left &= torch.arange(vocab) < (sampler.top_k or vocab)
        share_before = (mass.cumsum(0) - mass) / (mass * is_left).sum()
        places = [int((order == token).nonzero()) for token in (one, other)]
        gaps = [abs(float(share_before[place]) - sampler.top_p) for place in places]
        return min(gaps) < DECISION_MARGIN

    def assert_same(self, most_close_calls: int = 0) -> None:
        """Device and host agree, except in a few rows that rounding may decide."""
        self.assert_chosen(self.on_device()[0], most_close_calls)

    def assert_chosen(self, tokens: list[int], most_close_calls: int = 0) -> None:
        pairs = zip(tokens, self.on_host(), strict=True)
        differing = [(row, *pair) for row, pair in enumerate(pairs) if pair[0] != pair[1]]
        wrong = [difference for difference in differing if not self.is_close_call(*difference)]
        assert not wrong, [(*d, vars(self.samplers[d[0]].params)) for d in wrong]
        assert len(differing) <= most_close_calls


def set_sampler(table: SamplingTable, row: int, sampler: RowSampler) -> None:
    temperature = 0.0 if sampler.is_greedy else sampler.temperature
    table.set_row(row, temperature, sampler.seed, sampler.top_k, sampler.top_p, sampler.log_min_p)


def a_case(logits: Tensor, params: Sequence[dict[str, Any]], first_seed: int = 1000) -> Case:
    """A row for each of `params`, with a seed and a position of its own."""
    samplers = [
        make_sampler(logits.shape[1], first_seed + i, **own) for i, own in enumerate(params)
    ]
    return Case(logits, samplers, [1 + 7 * i % 50 for i in range(len(params))])


FILTERS: list[dict[str, Any]] = [
    dict(),
    dict(temperature=0.0),
    dict(temperature=0.6, top_k=20, top_p=0.95),
    dict(top_p=0.9),
    dict(temperature=1.7, top_p=0.3),
    dict(top_k=1),
    dict(temperature=0.8, top_k=40),
    dict(min_p=0.05),
    dict(temperature=2.0, min_p=0.3, top_p=0.8),
    dict(min_p=0.01, top_k=7),
    dict(temperature=1.3, min_p=0.02, top_k=200, top_p=0.7),
    dict(top_k=3, top_p=0.999),
    dict(temperature=1.2, top_k=2, top_p=0.6),
    dict(top_p=0.001),
    dict(min_p=1.0),
    dict(top_k=10_000, top_p=0.9),
    dict(temperature=0.7, top_k=250, top_p=0.97),
]


@pytest.mark.parametrize(
    "vocab, spread, rounds",
    [
        (300, 2.5, 1),
        (1024, 0.05, 1),
        pytest.param(300, 2.5, 3, marks=pytest.mark.slow),
        pytest.param(2500, 4.0, 1, marks=pytest.mark.slow),
        pytest.param(5000, 1.0, 1, marks=pytest.mark.slow),
    ],
    ids=["small", "flat", "many", "peaked", "large"],
)
def test_tokens_are_those_of_the_host(vocab: int, spread: float, rounds: int) -> None:
    params = FILTERS * rounds
    logits = torch.randn(len(params), vocab, generator=a_generator(vocab)) * spread
    a_case(logits, params).assert_same(most_close_calls=1)


@pytest.mark.parametrize("list_slots", [2, 64], ids=["searched", "listed"])
def test_it_does_not_matter_where_lists_end(
    list_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "LIST_SLOTS", list_slots)
    monkeypatch.setattr(sampling, "_PART_TOKENS", 64)
    params = [p for p in FILTERS if p.get("top_p", 1.0) < 1]
    logits = torch.randn(len(params), 250, generator=a_generator(8)) * 2
    a_case(logits, params, first_seed=70).assert_same()


def test_tokens_with_equal_scores_keep_their_order() -> None:
    params = FILTERS
    logits = (torch.randn(len(params), 1100, generator=a_generator(3)) * 2).round()
    a_case(logits, params).assert_same()


def _at_the_edge(num_rows: int, vocab: int, **params: float) -> Case:
    """Rows whose top_p is, as nearly as can be said, the share of the first so many tokens. Many
    scores are equal, and those with the noise to win stand around the edge."""
    generator = a_generator(num_rows)
    logits = (torch.randn(num_rows, vocab, generator=generator) * 1.5).round() / 2
    settings = []
    for row in logits:
        scores = (row / float(params.get("temperature", 1.0))).sort(descending=True).values
        left = scores[: int(params.get("top_k", vocab))].double().softmax(-1)
        num_kept = int(torch.randint(1, 9, (1,), generator=generator))
        settings.append(params | {"top_p": float(left[:num_kept].sum())})
    return a_case(logits, settings)


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"top_k": 15, "min_p": 1e-4}], ids=str)
@pytest.mark.parametrize("num_rows", [8, pytest.param(120, marks=pytest.mark.slow)])
def test_at_the_very_edge_of_top_p_device_and_host_keep_the_same_tokens(
    num_rows: int, params: dict[str, float]
) -> None:
    case = _at_the_edge(num_rows, 40, **params)
    assert case.on_device()[0] == case.on_host()


@triton.jit
def units_kernel(scores_ptr, highest, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, units_of(scores, highest), mask=at < count)


def test_mass_has_the_same_units_in_kernels_and_on_the_host() -> None:
    chance = torch.randn(20_000, generator=a_generator(5)) * 12
    special = torch.tensor([-math.inf, 40.0, 39.99999, -20.0, 8.0, 9.0, 0.0, -0.0, 1e-40])
    scores = torch.cat([special, chance.clamp(max=40.0)]).to(DEVICE)
    out = torch.full((len(scores),), -1, dtype=torch.int64, device=DEVICE)
    units_kernel[(triton.cdiv(len(scores), 4096),)](
        scores, 40.0, out, len(scores), BLOCK=4096, enable_fp_fusion=False
    )
    best = torch.tensor(40.0)
    assert torch.equal(out.cpu(), mass_in_units(scores.cpu(), best))
    assert torch.equal(out, mass_in_units(scores, best.to(DEVICE)))
    exact = (scores.cpu().double() - 40.0).exp() * 2.0**UNIT_BITS
    assert ((out.cpu() - exact).abs() <= 1 + 1e-6 * exact).all()


@pytest.mark.parametrize(
    "params, num_kept",
    # Half of the mass left by top_k is reached inside the third token.
    [
        (dict(top_k=5), 5),
        (dict(top_k=5, top_p=0.5), 3),
        (dict(top_p=0.01), 15),
        (dict(min_p=1.0), 1500),
    ],
    ids=str,
)
def test_where_all_scores_are_equal_the_lowest_ids_are_kept(
    params: dict[str, float], num_kept: int
) -> None:
    case = a_case(torch.full((5, 1500), 3.0), [params] * 5)
    tokens, _ = case.on_device()
    case.assert_chosen(tokens)
    assert max(tokens) < num_kept


@pytest.mark.parametrize("num_likely", [40, 100], ids=["listed", "searched"])
@pytest.mark.parametrize("top_k", [0, 30])
def test_top_p_is_a_share_of_what_min_p_and_top_k_leave(num_likely: int, top_k: int) -> None:
    # What min_p leaves is nearly even; those behind it have most of the mass, or next to none.
    logits = torch.full((4, 3000), -2.0)
    logits[2:] = -9.0
    logits[:, :num_likely] = torch.arange(num_likely) * -0.001
    params = dict(min_p=0.5, top_k=top_k, top_p=0.8)
    case = a_case(logits, [params] * 4)
    tokens, _ = case.on_device()
    case.assert_chosen(tokens)
    assert max(tokens) <= (top_k or num_likely) * 0.81


def test_a_list_that_is_one_token_short_is_not_used() -> None:
    num_first = LIST_SLOTS + 1
    last = sampling._PART_TOKENS  # in the second part
    logits = torch.full((1, last + 1), -math.inf)
    logits[0, :num_first] = 0.0
    logits[0, last] = 0.0

    def wins(seed: int) -> bool:
        own, stream, position = (torch.tensor([key]) for key in (seed, NoiseStream.SHARED, 1))
        noisy = logits + noise.gumbel(own, stream, position, last + 1)
        return int(noisy.argmax()) == last

    seed = next(seed for seed in range(1000) if wins(seed))
    for top_k, is_kept in ((num_first, False), (num_first + 1, True)):
        tokens, _ = a_case(logits, [dict(top_k=top_k)], first_seed=seed).on_device()
        assert (tokens == [last]) == is_kept


def test_scores_are_quotients_rounded_once() -> None:
    temperature = torch.tensor(1.9)
    lower = 1.9 + torch.rand(2000, generator=a_generator(10)) * 0.09
    higher = lower.nextafter(torch.tensor(9.0))
    # Equal quotients where a product with the inverse would tell the two apart.
    tie = lower / temperature == higher / temperature
    tie &= lower * (1 / temperature) != higher * (1 / temperature)
    logits = torch.stack([lower, higher, torch.full_like(lower, -9.0)], dim=1)[tie][:4]
    case = a_case(logits, [dict(temperature=1.9, top_k=1)] * 4)
    assert case.on_device()[0] == case.on_host() == [0] * 4


def test_ruled_out_tokens_are_never_chosen() -> None:
    allowed = torch.tensor([4, 9, 2900])
    logits = torch.full((len(FILTERS), 3000), -math.inf)
    logits[:, allowed] = torch.randn(len(FILTERS), 3, generator=a_generator(4))
    a_case(logits, FILTERS).assert_same()


def test_greedy_rows_take_the_lowest_of_the_best() -> None:
    logits = torch.zeros(3, 2500)
    logits[0, [2400, 1300]] = 5.0
    logits[1, [2047, 2048]] = 5.0
    greedy = a_case(logits, [dict(temperature=0.0)] * 3)
    assert greedy.on_device()[0] == [1300, 2047, 0]


@pytest.mark.parametrize("params", [dict(), dict(top_k=2, top_p=0.5, min_p=0.1)], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # they have no confidence
def test_rows_without_any_number_choose_no_token(params: dict[str, float]) -> None:
    logits = torch.full((3, 2100), math.nan)
    logits[1] = -math.inf
    logits[2, 2099] = 1.0
    tokens, _ = a_case(logits, [params] * 3).on_device()
    assert tokens == [-1, -1, 2099]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.9])
def test_confidence_is_the_margin_over_the_second_best(temperature: float) -> None:
    """Noise included, filters or not, be the second best in the same part of the vocabulary or in
    another."""
    num_rows, vocab = 12, 4200
    logits = torch.randn(num_rows, vocab, generator=a_generator(5)) * 3
    logits[0, [17, 18]] += 40.0
    logits[1, [17, 4100]] += 40.0
    case = a_case(
        logits, [{"temperature": temperature}, {"temperature": temperature, "top_k": 9}] * 6
    )
    tokens, confidence = case.on_device()
    noisy = logits.double() / (temperature or 1.0)
    if temperature:
        seeds = torch.tensor([sampler.seed for sampler in case.samplers])
        streams = torch.full((num_rows,), int(NoiseStream.SHARED))
        noisy += noise.gumbel(seeds, streams, torch.tensor(case.positions), vocab).double()
    best, ids = noisy.topk(2)
    is_best = ids[:, 0] == torch.tensor(tokens)
    expected = torch.where(is_best, (best[:, 0] - best[:, 1]).sigmoid(), 0.5)
    torch.testing.assert_close(confidence.double(), expected, rtol=1e-4, atol=1e-9)
    assert is_best[0] and is_best[1]
    assert is_best.all() == (temperature == 0), "noise lifts some that filters forbid"


def test_the_only_token_there_is_is_certain() -> None:
    logits = torch.full((2, 2100), -math.inf)
    logits[:, 70] = 1.0
    _, confidence = a_case(logits, [{}, {"temperature": 0.0}]).on_device()
    assert confidence.tolist() == [1.0, 1.0]


def test_padding_rows_are_marked_by_their_token_alone() -> None:
    logits = torch.randn(3, 500, generator=a_generator(6)).to(DEVICE)
    table = SamplingTable.create(4, DEVICE)
    table.set_row(2, 1.0, 5, top_k=4)
    rows = torch.tensor([-1, 2, -3], dtype=torch.int32, device=DEVICE)
    positions = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    tokens = torch.full((3,), 99, dtype=torch.int32, device=DEVICE)
    confidence = torch.full((3,), math.nan, device=DEVICE)
    choose_tokens(logits, table, rows, positions, tokens, confidence)
    assert tokens[0] == -1 and tokens[2] == -1 and 0 <= int(tokens[1]) < 500
    assert confidence.isnan().tolist() == [True, False, True]


def test_tokens_and_confidences_may_go_to_the_places_of_their_rows() -> None:
    logits = torch.randn(3, 500, generator=a_generator(9)).to(DEVICE)
    table = SamplingTable.create(4, DEVICE)
    rows = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
    positions = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    drafts = torch.full((4, 5), 99, dtype=torch.int32, device=DEVICE)
    sure = torch.full((4, 6), math.nan, device=DEVICE)
    choose_tokens(logits, table, rows, positions, drafts[:, 2], sure[:, 4], by_row=True)
    best = logits.argmax(-1).tolist()
    expected = torch.full((4, 5), 99, dtype=torch.int32)
    expected[3, 2], expected[0, 2] = best[0], best[2]
    assert torch.equal(drafts.cpu(), expected)
    assert sure.isfinite().nonzero().tolist() == [[0, 4], [3, 4]]


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(3, 2500, generator=a_generator(7))
    case = a_case(logits, [FILTERS[2], FILTERS[0], FILTERS[8]])
    tokens, confidence = case.on_device()
    for i in range(3):
        alone = Case(logits[i : i + 1], case.samplers[i : i + 1], case.positions[i : i + 1])
        own_token, own_confidence = alone.on_device()
        assert own_token == tokens[i : i + 1]
        assert torch.equal(own_confidence, confidence[i : i + 1])


def test_a_seed_beyond_63_bits_is_held_in_twos_complement() -> None:
    table = SamplingTable.create(1, DEVICE)
    table.set_row(0, 1.0, 2**64 - 1)
    assert table.seed.tolist() == [-1]


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_a_recorded_choice_follows_logits_and_settings() -> None:
    vocab, num_rows = 151_936, len(FILTERS)
    logits = torch.zeros(num_rows, vocab, device=DEVICE)
    table = SamplingTable.create(num_rows, DEVICE)
    rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    positions = torch.full((num_rows,), 3, dtype=torch.int32, device=DEVICE)
    tokens = torch.empty(num_rows, dtype=torch.int32, device=DEVICE)
    choose_tokens(logits, table, rows, positions, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose_tokens(logits, table, rows, positions, tokens)
    for attempt in range(3):
        values = torch.randn(num_rows, vocab, generator=a_generator(attempt)) * 3
        case = a_case(values, FILTERS, first_seed=attempt)
        for row, sampler in enumerate(case.samplers):
            set_sampler(table, row, sampler)
        positions.copy_(torch.tensor(case.positions))
        logits.copy_(values)
        graph.replay()
        case.assert_chosen(tokens.tolist(), most_close_calls=1)


@pytest.mark.parametrize("settings", [(0.0,), (1.0,), (0.7, 5, 0.9)])
def test_drafts_are_tokens_even_where_none_can_be_chosen(settings: tuple[Any, ...]) -> None:
    """They are fed to a model; that the target has nothing to choose ends the request."""
    logits = torch.full((2, 700), math.nan, device=DEVICE)
    logits[1] = 0.0
    logits[1, 650] = math.inf
    table = SamplingTable.create(2, DEVICE)
    temperature, *filters = settings
    for row in range(2):
        table.set_row(row, temperature, 5, *filters)
    rows = torch.arange(2, dtype=torch.int32, device=DEVICE)
    tokens = torch.full((2,), 99, dtype=torch.int32, device=DEVICE)
    choose_tokens(logits, table, rows, rows, tokens)
    assert tokens.tolist() == [-1, -1]
    choose_tokens(logits, table, rows, rows, tokens, by_row=True)
    assert all(0 <= token < 700 for token in tokens.tolist())
