"""The block pool: holding, sharing, forgetting, and noticing when it was corrupted."""

from __future__ import annotations

import pytest

from outrider.scheduler.pool import ROOT, BlockPool

FIRST, SECOND = [1, 2], [3, 4]


def published_chain(pool: BlockPool) -> list[int]:
    """Two held blocks, published under the text 1 2 3 4."""
    blocks = pool.allocate(2)
    assert blocks is not None
    node = pool.publish(blocks[0], ROOT, FIRST)
    pool.publish(blocks[1], node, SECOND)
    return blocks


def test_allocate_hands_out_every_block_once() -> None:
    pool = BlockPool(5, 2)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first is not None and second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]


def test_allocate_beyond_what_is_free_changes_nothing() -> None:
    pool = BlockPool(3, 2)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1


def test_released_blocks_can_be_allocated_again() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.release(blocks)
    assert pool.num_free == 3
    assert pool.allocate(3) is not None


def test_match_finds_the_published_prefix_and_holds_it() -> None:
    pool = BlockPool(4, 2)
    blocks = published_chain(pool)
    pool.release(blocks)
    assert pool.match([1, 2, 3, 4, 5])[0] == blocks
    assert pool.num_free == 2


def test_match_leaves_one_token_to_compute() -> None:
    pool = BlockPool(4, 2)
    blocks = published_chain(pool)
    assert pool.match([1, 2, 3, 4])[0] == blocks[:1]


def test_match_stops_at_the_first_other_block() -> None:
    pool = BlockPool(4, 2)
    blocks = published_chain(pool)
    assert pool.match([1, 2, 9, 9, 9])[0] == blocks[:1]


def test_a_block_is_found_only_after_its_own_predecessor() -> None:
    pool = BlockPool(4, 2)
    published_chain(pool)
    assert pool.match([3, 4, 5])[0] == []


def test_match_finds_nothing_without_prefix_caching() -> None:
    pool = BlockPool(4, 2, prefix_caching=False)
    published_chain(pool)
    assert pool.match([1, 2, 3, 4, 5]) == ([], ROOT)


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2, 2)
    blocks = published_chain(pool)
    shared, _ = pool.match([1, 2, 3, 4, 5])
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(shared)
    assert pool.num_free == 2


def test_the_tail_of_a_prefix_is_forgotten_before_its_start() -> None:
    pool = BlockPool(2, 2)
    blocks = published_chain(pool)
    pool.release(blocks)
    assert pool.allocate(1) == blocks[1:]
    assert pool.match([1, 2, 3, 4, 5])[0] == blocks[:1]


def test_the_prefix_released_first_is_forgotten_first() -> None:
    pool = BlockPool(2, 2)
    old, new = pool.allocate(1), pool.allocate(1)
    assert old is not None and new is not None
    pool.publish(new[0], ROOT, SECOND)
    pool.publish(old[0], ROOT, FIRST)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == old
    assert pool.match([*SECOND, 0])[0] == new


def bare_chain(pool: BlockPool) -> list[int]:
    """The same text of a request without a head."""
    blocks = pool.allocate(2)
    assert blocks is not None
    node = pool.publish(blocks[0], ROOT, FIRST, is_bare=True)
    pool.publish(blocks[1], node, SECOND, is_bare=True)
    return blocks


def test_bare_blocks_are_found_only_by_those_who_take_them() -> None:
    pool = BlockPool(4, 2)
    blocks = bare_chain(pool)
    assert pool.match([1, 2, 3, 4, 5], takes_bare=False) == ([], ROOT)
    assert pool.match([1, 2, 3, 4, 5])[0] == blocks


@pytest.mark.parametrize("is_held", [True, False])
def test_a_bare_block_gives_way_to_one_that_is_not(is_held: bool) -> None:
    pool = BlockPool(4, 2)
    bare = bare_chain(pool)
    if not is_held:
        pool.release(bare)
    num_published = pool.num_published
    whole = pool.allocate(1)
    assert whole is not None
    pool.publish(whole[0], ROOT, FIRST)
    assert pool.num_published > num_published
    assert pool.match([1, 2, 3, 4, 5], takes_bare=False)[0] == whole
    assert pool.match([1, 2, 3, 4, 5])[0] == [whole[0], bare[1]]
    held = [bare] if is_held else []
    pool.check_integrity([*held, whole, whole, [whole[0], bare[1]]])


def test_a_block_that_is_not_bare_stays_beside_one_that_is() -> None:
    pool = BlockPool(4, 2)
    whole = published_chain(pool)
    bare_chain(pool)
    assert pool.match([1, 2, 3, 4, 5], takes_bare=False)[0] == whole


def test_what_a_block_lacked_is_forgotten_with_it() -> None:
    pool = BlockPool(2, 2)
    pool.release(bare_chain(pool))
    blocks = published_chain(pool)
    assert pool.match([1, 2, 3, 4, 5], takes_bare=False)[0] == blocks


def test_unused_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3, 2)
    blocks = published_chain(pool)
    pool.release(blocks)
    taken = pool.allocate(1)
    assert taken is not None and taken[0] not in blocks


def test_the_same_text_published_twice_stays_with_the_first_block() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    assert blocks is not None
    first = pool.publish(blocks[0], ROOT, FIRST)
    assert pool.publish(blocks[1], ROOT, FIRST) == first
    pool.check_integrity([blocks])
    pool.release(blocks)
    assert pool.match([*FIRST, 0])[0] == blocks[:1]


def test_forgetting_what_was_published_keeps_the_holders() -> None:
    pool = BlockPool(4, 2)
    blocks = published_chain(pool)
    idle = pool.allocate(1)
    assert idle is not None
    pool.publish(idle[0], ROOT, [8, 9])
    pool.release(idle)
    pool.forget_published()
    pool.check_integrity([blocks])
    assert pool.match([1, 2, 3, 4, 5])[0] == []
    assert pool.num_free == 2


def test_what_is_withdrawn_is_not_found_again_whoever_holds_it() -> None:
    pool = BlockPool(3, 2)
    blocks = published_chain(pool)
    [private] = pool.allocate(1) or []
    pool.release(blocks[1:])
    pool.withdraw([blocks[0], private])
    pool.check_integrity([blocks[:1], [private]])
    assert pool.match([1, 2, 3, 4, 5])[0] == []
    pool.publish(private, ROOT, [1, 2])
    pool.release(blocks[:1])
    pool.check_integrity([[private]])
    assert pool.match([1, 2, 3, 4, 5])[0] == [private], "what came after it is gone as well"


def test_a_block_held_while_its_text_was_forgotten_returns_as_unused() -> None:
    pool = BlockPool(2, 2)
    blocks = published_chain(pool)
    pool.forget_published()
    pool.release(blocks)
    pool.check_integrity([])
    assert pool.num_free == 2


def test_integrity_holds_for_shared_private_and_idle_blocks() -> None:
    pool = BlockPool(6, 2)
    blocks = published_chain(pool)
    shared, _ = pool.match([1, 2, 3, 4, 5])
    private = pool.allocate(1)
    assert private is not None
    pool.check_integrity([blocks, shared + private])


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[0]], "holders differ"),
        ([[2], [2]], "holders differ"),
        ([[2, 2]], "names a block twice"),
    ],
)
def test_integrity_notices_tables_that_do_not_explain_the_holders(
    held: list[list[int]], message: str
) -> None:
    pool = BlockPool(3, 2)
    pool._holders[2] = 1
    pool._unused.remove(2)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(held)


def test_integrity_notices_a_block_that_is_free_twice() -> None:
    pool = BlockPool(3, 2)
    pool._unused.append(1)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity([])


def test_integrity_notices_a_held_block_among_the_free() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool._unused += blocks
    with pytest.raises(AssertionError, match="held block is free"):
        pool.check_integrity([blocks])


def test_integrity_notices_a_lost_block() -> None:
    pool = BlockPool(3, 2)
    pool._unused.pop()
    with pytest.raises(AssertionError, match="not the total"):
        pool.check_integrity([])


def test_integrity_notices_a_block_published_under_another_key() -> None:
    pool = BlockPool(3, 2)
    blocks = published_chain(pool)
    pool._key_of[blocks[0]] = (ROOT, (7, 7))
    with pytest.raises(AssertionError, match="another key"):
        pool.check_integrity([blocks])
