"""The parts of the GPU benchmarks that need no GPU."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from outrider.benchmarks import gpu
from outrider.benchmarks.gpu_engine import Decoding
from outrider.benchmarks.gpu_tune import PRODUCTS, Product, candidates, entry
from outrider.benchmarks.gpu_variants import share_of_same
from outrider.benchmarks.inflate_recipes import SHAPES, inflate_spec
from outrider.checkpoints.resolve import draft_assets
from outrider.kernels import gpu as gpu_kernels
from outrider.kernels.gpu.tuning import SHARED_BYTES, LibraryConfig, linear_config, product_config
from outrider.workers.cuda_graphs.captured_passes import row_sizes
from outrider.workers.weights.checkpoint import load_spec


def test_what_a_run_took() -> None:
    found = Decoding(tokens=300, rounds=100, wall_s=0.5, device_s=0.45, draft_s=0.05)
    assert found.ms_per_token == pytest.approx(0.5 / 300 * 1e3)
    assert found.tokens_per_round == 3
    assert found.ms_per_round == pytest.approx(5)
    assert found.host_ms_per_round == pytest.approx(0.5)
    assert found.draft_ms_per_round == pytest.approx(0.5)
    assert found.verify_ms_per_round == pytest.approx(4)


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
        way = product_config(item.kind, item.features, item.depth, rows)
        # As in the table; the rule for unknown shapes has no lines.
        assert isinstance(way, LibraryConfig) or way.lines == 2
    assert linear_config(item.kind, item.features, item.depth, 16).lines == 2


@pytest.mark.parametrize("rows", [size for size in row_sizes(512) if size > 64])
@pytest.mark.parametrize("item", PRODUCTS["8b"], ids=str)
def test_recorded_sizes_under_load_have_candidates_and_an_entry(item: Product, rows: int) -> None:
    """Blocks hold every row, fit shared memory and cut the depth into equal parts."""
    most = item.head_dim // 2 if item.kind == "qkv" else item.features
    for config in candidates(item, rows):
        block = config.rows + config.rest
        held = config.features * (1 if item.kind == "linear" else 2)
        assert block and -(-rows // block) * block <= 1.35 * rows
        assert config.features <= most
        assert (held + block) * config.depth * 2 * config.stages <= SHARED_BYTES
        assert item.depth % (config.depth * config.splits) == 0
    table = json.loads(files(gpu_kernels).joinpath("tuned.json").read_text())
    assert item.key(rows) in table
    assert (
        entry(product_config(item.kind, item.features, item.depth, rows)) == table[item.key(rows)]
    )


def test_shares_of_equal_texts() -> None:
    assert share_of_same([[1, 2], [3]], [[1, 2], [4]]) == 0.5
