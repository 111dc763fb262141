"""Cached prompts are shared under equal salts only, in both pools."""

from __future__ import annotations

import random

import pytest
from scheduler_tools import Record, Simulation, make_request

from outrider.catalog.proposers import DRAFT
from outrider.scheduler.pool import ROOT, BlockPool

PROMPT = list(range(13))


def run_alone(simulation: Simulation, name: str, salt: str, max_tokens: int = 8) -> Record:
    request = make_request(name, PROMPT, max_tokens, cache_salt=salt, proposer=DRAFT, depth=2)
    record = simulation.add(request)
    simulation.drain()
    return record


def test_a_block_is_found_under_the_salt_it_was_published_under() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], "salt", [1, 2])
    assert pool.match([1, 2, 3], "salt")[0] == blocks
    assert pool.match([1, 2, 3], "another") == ([], "another")
    assert pool.match([1, 2, 3]) == ([], ROOT)


def test_requests_of_one_salt_share_and_of_different_ones_do_not() -> None:
    simulation = Simulation(block_size=4)
    salts = ["", "a", "b", "", "a", "b"]
    cached = [
        run_alone(simulation, f"r{index}", salt).num_cached_tokens
        for index, salt in enumerate(salts)
    ]
    assert cached == [0, 0, 0, 12, 12, 12]


def test_the_drafts_cache_has_salts_as_well_also_for_a_draft_that_came_back() -> None:
    simulation = Simulation(block_size=4)
    run_alone(simulation, "first", "a", max_tokens=20)
    simulation.lose_draft()
    simulation.add(make_request("second", PROMPT, cache_salt="a", proposer=DRAFT, depth=2))
    simulation.step()
    simulation.regain_draft()
    simulation.drain()
    pool = simulation.draft_pool
    assert pool.num_published
    assert all(root in ("a", ROOT) or isinstance(root, int) for root, _ in pool._published)
    blocks, _ = pool.match([*PROMPT, 0])
    assert blocks == []
    blocks, _ = pool.match([*PROMPT, 0], "a")
    assert len(blocks) == 3
    pool.release(blocks)


def test_a_request_that_gave_up_its_draft_publishes_under_its_salt() -> None:
    simulation = Simulation(block_size=4, draft_blocks=70)
    first = simulation.add(
        make_request("first", PROMPT, 40, cache_salt="a", proposer=DRAFT, depth=2)
    )
    for _ in range(3):
        simulation.step()
    simulation.scheduler._running_requests.give_up_draft(first.request)
    assert first.request.draft.node == "a"
    simulation.drain()


def test_a_preempted_request_finds_its_own_text_again() -> None:
    simulation = Simulation(num_blocks=12, block_size=4, max_num_seqs=2)
    for name in ("first", "second"):
        simulation.add(make_request(name, PROMPT, 24, cache_salt=name))
    simulation.drain()
    preempted = [each for each in simulation.records.values() if each.request.num_preemptions]
    assert preempted
    assert all(each.num_cached_tokens for each in preempted)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_cached_for_a_request_was_computed_under_its_salt(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(num_blocks=40, block_size=2, max_num_seqs=4)
    known: dict[str, list[list[int]]] = {"": [], "a": [], "b": []}
    for index in range(60):
        salt = rng.choice(list(known))
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 8))]
        record = simulation.add(make_request(f"r{index}", prompt, 4, cache_salt=salt))
        simulation.drain()
        cached = prompt[: record.num_cached_tokens]
        assert not cached or any(text[: len(cached)] == cached for text in known[salt])
        known[salt].append(prompt + record.tokens)
