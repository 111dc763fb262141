"""Seats and tokens by device, and how KV is shared between target and draft."""

from __future__ import annotations

import pytest

from outrider.config import EngineConfig
from outrider.engine.sizing import (
    BlockBytes,
    PoolSizes,
    default_max_depth,
    make_scheduler,
    settle_for_device,
    size_pools,
    size_pools_of_ranks,
    size_replacement_draft,
)
from outrider.errors import CapacityError
from outrider.links.rank_messages import WeightsLoaded

KIB, GIB = 2**10, 2**30
BLOCK = 16


def configured(**options: int | float | None) -> EngineConfig:
    usual = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "block_size": BLOCK}
    return EngineConfig.from_kwargs(model="m", **usual | options)


def rank(block_bytes: int, kv_bytes: int | None) -> WeightsLoaded:
    return WeightsLoaded(block_bytes, kv_bytes, "none", 0.0)


# -- what the device decides ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "gpu_gb", "seats", "tokens", "limit_ms"),
    [
        ("cpu", None, 64, 512, 500),
        ("cuda", 24, 64, 512, 50),
        ("cuda", 29.9, 64, 512, 50),
        ("cuda", 30, 128, 1024, 50),
        ("cuda", 59.9, 128, 1024, 50),
        ("cuda", 60, 256, 2048, 50),
        ("cuda", 139.8, 256, 2048, 50),
    ],
)
def test_seats_tokens_and_step_limit_follow_the_device(
    device: str, gpu_gb: float | None, seats: int, tokens: int, limit_ms: float
) -> None:
    gpu_bytes = None if gpu_gb is None else int(gpu_gb * GIB)
    settled = settle_for_device(EngineConfig(), device, gpu_bytes).scheduler
    assert (settled.num_seats, settled.num_step_tokens) == (seats, tokens)
    assert settled.step_limit_ms == limit_ms


@pytest.mark.parametrize(
    ("given", "seats", "tokens"),
    [
        ({"max_num_seqs": 8}, 8, 512),
        ({"max_num_seqs": 600}, 600, 600),
        ({"max_num_batched_tokens": 4096}, 64, 4096),
        ({"max_num_batched_tokens": 10}, 10, 10),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 10}, 3, 10),
    ],
)
def test_what_is_given_stays_and_the_other_makes_room_for_it(
    given: dict[str, int], seats: int, tokens: int
) -> None:
    settled = settle_for_device(EngineConfig.from_kwargs(model="m", **given), "cpu", None)
    assert (settled.scheduler.num_seats, settled.scheduler.num_step_tokens) == (seats, tokens)
    assert settle_for_device(settled, "cuda", 200 * GIB) == settled, "settled once and for all"


@pytest.mark.parametrize(
    ("given", "device", "method"),
    [
        ({}, "cpu", "ngram"),
        ({}, "cuda", None),  # where passes are as large as planned
        ({"speculation_policy": "fixed"}, "cpu", None),  # which would not stop
        ({"draft_model": "small"}, "cpu", "draft"),
        ({"draft_model": "none"}, "cpu", None),
        ({"draft_model": "none", "method": "auto"}, "cpu", "ngram"),
        ({"method": "off"}, "cpu", None),
        ({"method": "ngram"}, "cuda", "ngram"),
    ],
)
def test_without_a_draft_ngram_proposes_on_a_cpu_unless_settings_say_otherwise(
    given: dict[str, str], device: str, method: str | None
) -> None:
    config = EngineConfig.from_kwargs(model="m", **given)
    settled = settle_for_device(config, device, gpu_bytes=None)
    assert settled.method == method
    assert EngineConfig.from_settings(settled.to_settings()).method == method


@pytest.mark.parametrize(
    ("policy", "on_cpu", "on_gpu"),
    [("goodput", 4, 5), ("threshold", 4, 5), ("trim", 2, 5), ("fixed", 2, 5)],
)
def test_depth_is_a_maximum_or_exact_as_the_policy_has_it(
    policy: str, on_cpu: int, on_gpu: int
) -> None:
    config = EngineConfig.from_kwargs(model="m", speculation_policy=policy)
    assert (default_max_depth(config, "cpu"), default_max_depth(config, "cuda")) == (on_cpu, on_gpu)
    given = EngineConfig.from_kwargs(model="m", speculation_policy=policy, num_speculative_tokens=3)
    assert (default_max_depth(given, "cpu"), default_max_depth(given, "cuda")) == (3, 3)


# -- one memory for both --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2048, 8192, 131_072])
def test_a_loaded_draft_takes_at_most_three_hundredths_of_the_targets_tokens(length: int) -> None:
    config, kv_bytes = configured(), 100 * 10**9
    alone = size_pools(config, kv_bytes, BlockBytes(128 * KIB * BLOCK), length)
    both = size_pools(config, kv_bytes, BlockBytes(128 * KIB * BLOCK, 12 * KIB * BLOCK), length)
    assert alone.draft == 0
    assert both.target >= 0.97 * alone.target
    assert both.draft * BLOCK >= max(length, 256 * 768)


def test_a_draft_gets_no_more_than_short_requests_in_all_seats_need() -> None:
    pools = size_pools(configured(max_num_seqs=4), GIB, BlockBytes(4096, 1024), 40)
    assert pools == PoolSizes(target=4 * 3, draft=4 * 3, max_model_len=40)


def test_both_pools_together_keep_the_memory_they_are_given() -> None:
    target, draft = 3000, 1000
    for num_bytes in range(target + draft, 2_000_000, 12_345):
        config = configured(max_num_seqs=8)
        pools = size_pools(config, num_bytes, BlockBytes(target, draft), 2000)
        assert pools.target * target + pools.draft * draft <= num_bytes
        assert 1 <= pools.draft <= pools.target


def test_where_memory_is_short_a_draft_follows_every_token_of_the_target() -> None:
    pools = size_pools(configured(), 40_000, BlockBytes(3000, 1000), 8192)
    assert pools == PoolSizes(target=10, draft=10, max_model_len=160)


def test_memory_for_one_request_counts_both_models() -> None:
    config = configured(max_model_len=160)
    assert size_pools(config, 40_000, BlockBytes(3000, 1000), 160).max_model_len == 160
    with pytest.raises(CapacityError, match=r"holds 144 tokens.*max_model_len \(160\)"):
        size_pools(config, 39_999, BlockBytes(3000, 1000), 160)


# -- ranks ----------------------------------------------------------------------------------------


def test_ranks_without_limits_of_their_own_share_what_is_configured() -> None:
    config = configured(kv_cache_gb=4000 * 1000 / GIB)
    pools = size_pools_of_ranks(config, [rank(2000, None)] * 2, [rank(500, None)], 8192)
    assert pools.target == pools.draft == 4000 * 1000 // 4500


def test_ranks_on_gpus_hold_what_the_tightest_of_their_own_group_can() -> None:
    target = [rank(1000, 40_000_000), rank(1000, 30_000_000)]
    draft = [rank(100, 70_000), rank(100, 60_000)]
    pools = size_pools_of_ranks(configured(), target, draft, 8192)
    assert pools == PoolSizes(target=30_000, draft=600, max_model_len=8192)


def test_a_roomy_gpu_of_a_draft_gives_it_what_it_needs_and_no_more() -> None:
    pools = size_pools_of_ranks(configured(), [rank(1000, 10**9)], [rank(1, 10**9)], 2048)
    assert pools.draft == 256 * 768 // BLOCK
    short = size_pools_of_ranks(configured(), [rank(1000, 10**6)], [rank(1, 10**9)], 2048)
    assert short.draft == short.target == 1000


def test_groups_on_one_gpu_share_what_it_has_left() -> None:
    target, draft, left = rank(1000, 10**9), rank(500, 4 * 10**6), 4 * 10**6
    apart = size_pools_of_ranks(configured(), [target], [draft], 2048)
    together = size_pools_of_ranks(configured(), [target], [draft], 2048, share_gpu=True)
    assert 1000 * apart.target + 500 * apart.draft > left
    assert left * 0.9 < 1000 * together.target + 500 * together.draft <= left


def test_a_draft_on_the_cpu_does_not_limit_a_target_on_a_gpu() -> None:
    pools = size_pools_of_ranks(configured(), [rank(1000, 10**8)], [rank(10**6, None)], 2048)
    assert (pools.target, pools.draft) == (32_768, 256 * 48)


@pytest.mark.parametrize("full", ["target", "draft"])
def test_a_gpu_without_room_for_a_block_is_refused(full: str) -> None:
    room = {"target": 10**6, "draft": 10**6} | {full: 99}
    with pytest.raises(CapacityError, match="no memory left for KV"):
        size_pools_of_ranks(
            configured(), [rank(100, room["target"])], [rank(100, room["draft"])], 64
        )


@pytest.mark.parametrize(("block_bytes", "expected"), [(100, 64), (300, 26), (1_000, 8)])
def test_another_draft_has_what_the_target_leaves_and_it_needs(
    block_bytes: int, expected: int
) -> None:
    config = configured(kv_cache_gb=72_000 / 2**30, max_num_seqs=1)
    pools = PoolSizes(target=64, draft=32, max_model_len=1024)
    target = [rank(1_000, None)]
    assert size_replacement_draft(config, pools, target, [rank(block_bytes, None)]) == expected


def test_another_draft_without_memory_is_refused() -> None:
    config = configured(kv_cache_gb=64_000 / 2**30, max_num_seqs=1)
    pools = PoolSizes(target=64, draft=32, max_model_len=1024)
    with pytest.raises(CapacityError, match="no memory left for the KV of this draft"):
        size_replacement_draft(config, pools, [rank(1_000, None)], [rank(100, None)])


def test_a_scheduler_has_the_pools_it_is_given() -> None:
    scheduler = make_scheduler(configured(), PoolSizes(30, 20, 64), lag=0)
    assert (scheduler.target_pool.num_blocks, scheduler.draft_pool.num_blocks) == (30, 20)
    alone = make_scheduler(configured(), PoolSizes(30, 0, 64), lag=0)
    assert alone.draft_pool.num_blocks == 0
