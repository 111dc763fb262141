"""The noise hash: fixed for ever, independent in every part of its key, never infinite."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from c_kernels import make_ops, skip_without_compiler
from scipy import stats
from torch import Tensor

from outrider.kernels import noise
from outrider.kernels import seeds as seeds_of
from outrider.kernels.cpu.build import library_path
from outrider.kernels.noise import NoiseStream
from outrider.kernels.ops import Ops
from outrider.kernels.reference import ReferenceOps

VOCAB = 1000


def bits_of(seeds: Tensor, streams: Tensor, positions: Tensor, num_tokens: int = VOCAB) -> Tensor:
    seeds, streams, positions = torch.broadcast_tensors(seeds, streams, positions)
    return noise.noise_bits(seeds, streams, positions, num_tokens)


def c_library() -> ctypes.CDLL:
    skip_without_compiler()
    return ctypes.CDLL(str(library_path()))


def c_gumbel(bits: Tensor) -> Tensor:
    out = torch.empty(len(bits))
    words = (bits - (bits >> 31 << 32)).to(torch.int32)
    c_library().outrider_gumbel_of_bits(
        ctypes.c_void_p(words.data_ptr()),
        ctypes.c_int64(len(bits)),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def test_golden_values_never_change() -> None:
    seeds = torch.tensor([0, 1, seeds_of.signed64(0xFEDCBA9876543210), -1])
    streams = torch.tensor(
        [NoiseStream.SHARED, NoiseStream.DRAFT, NoiseStream.ACCEPT, NoiseStream.RESIDUAL]
    )
    positions = torch.tensor([0, 1, 4095, 1 << 40])
    assert bits_of(seeds, streams, positions, 4).tolist() == GOLDEN_BITS


def test_golden_sample_seeds_never_change() -> None:
    assert [seeds_of.sample_seed(7, i) for i in range(3)] == GOLDEN_SAMPLE_SEEDS


def test_sample_seeds_are_distinct_from_each_other_and_from_the_seed() -> None:
    seeds = {seeds_of.sample_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds | set(range(100))) == 10_100


def test_a_tokens_noise_does_not_depend_on_the_vocabulary_or_the_other_rows() -> None:
    seeds, zero = torch.arange(5), torch.tensor(0)
    together = bits_of(seeds, zero, torch.tensor(9), 300)
    alone = bits_of(seeds[3:4], zero, torch.tensor(9), 20)
    assert torch.equal(together[3:4, :20], alone)


def test_uniform_is_the_same_hash_as_the_noise_bits() -> None:
    key = torch.tensor([3]), torch.tensor([2]), torch.tensor([17])
    expected = (noise.noise_bits(*key, 6)[0, 5].double() + 0.5) * 2.0**-32
    assert noise.uniform(*key, torch.tensor([5])).item() == expected.item()


@pytest.mark.parametrize("part", ["seed", "stream", "position"])
def test_consecutive_keys_are_uniform_and_uncorrelated(part: str) -> None:
    count = 8 if part == "stream" else 2000
    line, zero = torch.arange(count), torch.tensor(0)
    keys = {"seed": zero, "stream": zero, "position": zero, part: line}
    bits = bits_of(keys["seed"], keys["stream"], keys["position"])
    for shift in (0, 12, 24):
        buckets = torch.bincount(((bits >> shift) & 0xFF).flatten(), minlength=256)
        assert stats.chisquare(buckets.numpy()).pvalue > 1e-4
    u = (bits.double() / 2**32 - 0.5) * 12**0.5
    standard_error = u[1:].numel() ** -0.5
    assert abs((u[1:] * u[:-1]).mean().item()) < 5 * standard_error  # neighbouring keys
    assert abs((u[:, 1:] * u[:, :-1]).mean().item()) < 5 * standard_error  # neighbouring tokens
    assert abs((u[1:, 1:] * u[:-1, :-1]).mean().item()) < 5 * standard_error  # diagonal


@pytest.mark.parametrize("bit", [0, 1, 7, 31, 32, 63])
def test_flipping_one_bit_of_the_seed_flips_half_of_the_bits(bit: int) -> None:
    seeds, zero = torch.arange(200), torch.tensor(0)
    flipped = seeds ^ seeds_of.signed64(1 << bit)
    assert_avalanche(bits_of(seeds, zero, zero) ^ bits_of(flipped, zero, zero))


@pytest.mark.parametrize("bit", [0, 1, 5, 13, 30])
def test_flipping_one_bit_of_the_position_flips_half_of_the_bits(bit: int) -> None:
    positions, zero = torch.arange(200), torch.tensor(0)
    assert_avalanche(bits_of(zero, zero, positions) ^ bits_of(zero, zero, positions ^ (1 << bit)))


@pytest.mark.parametrize("bit", [0, 1, 5, 9])
def test_flipping_one_bit_of_the_token_flips_half_of_the_bits(bit: int) -> None:
    bits = bits_of(torch.arange(200), torch.tensor(0), torch.tensor(0), 1024)
    assert_avalanche(bits ^ bits[:, torch.arange(1024) ^ (1 << bit)])


def assert_avalanche(changed: Tensor) -> None:
    share = torch.stack([(changed >> i & 1).double().mean() for i in range(32)])
    assert share.min().item() > 0.49 and share.max().item() < 0.51


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    zero = torch.tensor(0)
    seeds, streams, positions = torch.broadcast_tensors(torch.arange(200), zero, zero)
    sample = noise.gumbel(seeds, streams, positions, VOCAB).flatten().numpy()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-4


def test_winners_over_sequential_seeds_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.009, 0.001], dtype=torch.float64)
    num_seeds = 200_000
    seeds, zeros = torch.arange(num_seeds), torch.zeros(num_seeds, dtype=torch.int64)
    scores = probabilities.log().expand(num_seeds, -1)
    winners = ReferenceOps().gumbel_argmax(scores, seeds, zeros, zeros)
    counts = torch.bincount(winners, minlength=6)
    assert stats.chisquare(counts.numpy(), probabilities.numpy() * num_seeds).pvalue > 1e-4


EXTREME_BITS = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])


def test_c_noise_is_finite_and_accurate_at_the_extremes() -> None:
    u = (EXTREME_BITS.double() + 0.5) * 2.0**-32
    expected = -(-torch.log1p(-u)).log()
    assert (c_gumbel(EXTREME_BITS).double() - expected).abs().max().item() < 2e-6


def test_reference_noise_is_finite_at_the_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "noise_bits", lambda *_: EXTREME_BITS.unsqueeze(0))
    one = torch.tensor([0])
    assert noise.gumbel(one, one, one, 6).isfinite().all()


def test_c_noise_is_accurate_everywhere() -> None:
    bits = torch.randint(0, 2**32, (20_000,), generator=torch.Generator().manual_seed(0))
    u = (bits.double() + 0.5) * 2.0**-32
    expected = -(-torch.log1p(-u)).log()
    error = (c_gumbel(bits).double() - expected).abs() / expected.abs().clamp(min=1)
    assert error.max().item() < 1e-6


def test_c_bits_equal_the_reference() -> None:
    library = c_library()
    out_bits, out_noise = torch.empty(VOCAB, dtype=torch.int32), torch.empty(VOCAB)
    for seed, stream, position in ((0, 0, 0), (-5, 3, 123_456), (1 << 62, 1, 1 << 33)):
        library.outrider_gumbel(
            *(ctypes.c_int64(v) for v in (seed, stream, position, VOCAB)),
            *(ctypes.c_void_p(t.data_ptr()) for t in (out_bits, out_noise)),
        )
        expected = noise.noise_bits(
            torch.tensor([seed]), torch.tensor([stream]), torch.tensor([position]), VOCAB
        )
        assert torch.equal(out_bits.long() & 0xFFFFFFFF, expected[0])


@pytest.mark.parametrize("vocab", [1, 3, 17, 1000, 49152])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 30.0])
def test_c_argmax_equals_the_reference(vocab: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(12, vocab, generator=generator) / temperature
    scores[:, 1::3] = float("-inf")
    seeds = torch.randint(-(2**62), 2**62, (12,), generator=generator)
    streams, positions = torch.arange(12) % 4, torch.arange(12) * 1000
    args = scores, seeds, streams, positions
    assert torch.equal(c_ops().gumbel_argmax(*args), ReferenceOps().gumbel_argmax(*args))


def test_c_argmax_never_chooses_minus_infinity() -> None:
    scores = torch.full((50, 1003), float("-inf"))
    scores[:, 777] = -1e30
    seeds = torch.arange(50)
    assert (c_ops().gumbel_argmax(scores, seeds, seeds % 4, seeds) == 777).all()


def test_c_argmax_of_no_rows_is_empty() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert c_ops().gumbel_argmax(torch.empty(0, 10), none, none, none).shape == (0,)


@pytest.mark.parametrize("backend", ["c", "torch"])
@pytest.mark.parametrize("bounds", [(0, 1, 3), (0, 171, 400, 1003), (0, 8191, 24_000, 49_152)])
def test_the_best_of_all_parts_is_the_best_of_the_whole_bit_for_bit(
    backend: str, bounds: tuple[int, ...]
) -> None:
    ops, generator = make_ops(backend), torch.Generator().manual_seed(bounds[1])
    scores = torch.randn(40, bounds[-1], generator=generator)
    scores[:, 1::3] = float("-inf")
    seeds = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    keys = seeds, torch.arange(40) % 4, torch.arange(40) * 1000
    best, tokens = [], []
    for first, stop in itertools.pairwise(bounds):
        of_part, columns = ops.gumbel_max(scores[:, first:stop], *keys, first)
        best.append(of_part)
        tokens.append(columns + first)
    owners = torch.stack(best).argmax(0, keepdim=True)
    assert len(owners.unique()) == len(best)
    whole_best, whole_tokens = ops.gumbel_max(scores, *keys, 0)
    assert torch.equal(torch.stack(best).gather(0, owners)[0], whole_best)
    assert torch.equal(torch.stack(tokens).gather(0, owners)[0], whole_tokens)
    assert torch.equal(ops.gumbel_argmax(scores, *keys), whole_tokens)


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_the_best_score_is_that_of_its_column_with_the_noise_of_its_token(backend: str) -> None:
    scores, seeds = torch.zeros(8, 50), torch.arange(8)
    best, columns = make_ops(backend).gumbel_max(scores, seeds, seeds % 4, seeds, 700)
    own = noise.gumbel(seeds, seeds % 4, seeds, 750).gather(-1, columns[:, None] + 700)[:, 0]
    torch.testing.assert_close(best, own)


@pytest.mark.parametrize("backend", ["c", "torch"])
@pytest.mark.parametrize("vocab", [3, 1003, 49_152])
def test_nan_is_the_best_of_all_wherever_it_is(backend: str, vocab: int) -> None:
    """Otherwise a broken model's tokens would be served unnoticed."""
    ops, seeds = make_ops(backend), torch.arange(1)
    for column in {0, vocab // 2, vocab - 1}:
        scores = torch.zeros(1, vocab)
        scores[0, column] = float("nan")
        best, columns = ops.gumbel_max(scores, seeds, seeds, seeds, 0)
        assert best.isnan().all() and columns.tolist() == [column]
        assert ops.gumbel_argmax(scores, seeds, seeds, seeds).tolist() == [column]


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_a_part_without_a_possible_token_offers_minus_infinity(backend: str) -> None:
    scores, seeds = torch.full((2, 9), float("-inf")), torch.arange(2)
    best, columns = make_ops(backend).gumbel_max(scores, seeds, seeds, seeds, 30)
    assert best.tolist() == [float("-inf")] * 2
    assert columns.tolist() == [0, 0]


def test_noise_from_a_later_id_on_is_the_rest_of_the_noise() -> None:
    key = torch.tensor([3]), torch.tensor([2]), torch.tensor([17])
    assert torch.equal(noise.gumbel(*key, 40, 60), noise.gumbel(*key, 100)[:, 60:])


def c_ops() -> Ops:
    return make_ops("c")


GOLDEN_BITS = [
    [937234001, 2360835434, 2247059445, 2262260282],
    [2159060929, 2939383325, 1921504683, 307269226],
    [715890676, 4215843515, 3204070659, 1690315681],
    [479011447, 4077307464, 1954534262, 610261052],
]
GOLDEN_SAMPLE_SEEDS = [
    8980819522359644348,
    1917377632227706479,
    17498999200347373759,
]
