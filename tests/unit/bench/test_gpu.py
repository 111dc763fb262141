"""The parts of the GPU benchmarks that need no GPU."""

from __future__ import annotations

import pytest

from outrider.bench import gpu
from outrider.bench.gpu_engine import Decoding
from outrider.bench.gpu_tune import PRODUCTS, Product, candidates
from outrider.bench.gpu_variants import share_of_same
from outrider.bench.inflate_recipes import SHAPES, inflate_spec
from outrider.kernels.gpu.tuning import linear_config
from outrider.workers.weights.loader import load_spec
from outrider.workers.weights.resolve import draft_assets


def test_what_a_run_took() -> None:
    found = Decoding(tokens=300, rounds=100, wall_s=0.5, device_s=0.45)
    assert found.ms_per_token == pytest.approx(0.5 / 300 * 1e3)
    assert found.tokens_per_round == 3
    assert found.ms_per_round == pytest.approx(5)
    assert found.host_ms_per_round == pytest.approx(0.5)


def test_arithmetic_of_a_prefill() -> None:
    spec = inflate_spec(load_spec(draft_assets()), SHAPES["llama-3.1-8b"])
    linears = 2 * 8192 * 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    attention = 2 * 8192**2 * 4096 * 32
    assert gpu.prefill_flops(spec, 8192) == pytest.approx(linears + attention, rel=1e-3)
    assert gpu.kv_bytes_per_token(spec) == 131072


@pytest.mark.parametrize("item", [item for items in PRODUCTS.values() for item in items], ids=str)
def test_products_have_candidates_and_an_entry_in_the_table(item: Product) -> None:
    """Each fits shared memory and cuts the depth into equal parts."""
    found = list(candidates(item, 16))
    assert found
    assert all(item.depth % (config.depth * config.splits) == 0 for config in found)
    for rows in (16, 32, 64):
        config = linear_config(item.kind, item.features, item.depth, rows)
        assert config.lines == 2  # as in the table; the rule for unknown shapes has none


def test_shares_of_equal_texts() -> None:
    assert share_of_same([[1, 2], [3]], [[1, 2], [4]]) == 0.5
