"""The store that process groups meet through: who may write there, and what it does."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from rendezvous import SECRET, OpenRendezvous

from outrider.links import rendezvous_store as board_module
from outrider.links.frames import LinkError
from outrider.workers.groups.link_store import LinkStore, dist
from outrider.workers.groups.process_group import TensorParallelGroup

CPU = torch.device("cpu")


@pytest.fixture
def board() -> Iterator[OpenRendezvous]:
    with OpenRendezvous() as opened:
        yield opened


def test_a_process_without_the_secret_cannot_reach_the_board(board: OpenRendezvous) -> None:
    with pytest.raises(LinkError, match="refused this process"):
        LinkStore(board.address, "a guess", 5)


def test_what_one_rank_writes_another_reads(board: OpenRendezvous) -> None:
    one, other = board.store(), board.store()
    one.set("key", b"\x00\xff")
    one.set("text", "word")
    assert (other.get("key"), other.get("text")) == (b"\x00\xff", b"word")
    assert other.check(["key", "text"]) and not other.check(["key", "nothing"])
    assert [one.add("count", 2), other.add("count", 3)] == [2, 5]
    assert other.delete_key("key") and not other.delete_key("key")


def test_reading_waits_until_something_is_written(board: OpenRendezvous) -> None:
    one, other = board.store(), board.store()
    timer = threading.Timer(0.2, lambda: one.set("late", "word"))
    timer.start()
    assert other.get("late") == b"word"
    timer.join()


def test_who_waits_holds_up_nobody_and_not_for_ever(board: OpenRendezvous) -> None:
    store = board.store()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["never"], timedelta(seconds=3))
        start_s = time.monotonic()
        store.set("other", "word")
        assert store.get("other") == b"word"
        assert time.monotonic() - start_s < 3 and not waiting.done()
        with pytest.raises(dist.DistStoreError, match="no rank has written never within 3 s"):
            waiting.result(30)


def test_an_engine_that_is_gone_is_an_error_but_for_a_look(board: OpenRendezvous) -> None:
    store = board.store()
    store.close()
    assert store.check(["key"]) is False
    with pytest.raises(dist.DistStoreError):
        store.set("key", "word")


def test_ranks_cannot_write_without_limit(
    board: OpenRendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "MAX_STORE_BYTES", 1000)
    store = board.store()
    for _ in range(5):
        store.set("key", b"x" * 900)  # the same again takes no more room
    with pytest.raises(dist.DistStoreError):
        store.set("another", b"x" * 900)
    assert board.store().get("key") == b"x" * 900


def test_what_a_group_wrote_is_forgotten_with_it(board: OpenRendezvous) -> None:
    store = board.store()
    for key in ("draft/1/a", "draft/11/a"):
        store.set(key, "word")
    board.listener.store.forget("draft/1")
    assert not store.check(["draft/1/a"]) and store.check(["draft/11/a"])


def test_more_processes_than_ranks_do_not_fit(board: OpenRendezvous) -> None:
    stores = [LinkStore(board.address, SECRET, 5) for _ in range(9)]
    try:
        for store in stores[:8]:
            store.set("key", "word")
        with pytest.raises(dist.DistStoreError):
            stores[8].set("key", "word")
        stores[0].close()
        late = _until_seated(board)
        late.close()
    finally:
        for store in stores:
            store.close()


def _until_seated(board: OpenRendezvous) -> LinkStore:
    deadline_s = time.monotonic() + 60
    while True:
        store = LinkStore(board.address, SECRET, 5)
        with contextlib.suppress(dist.DistStoreError):  # refused, and told so while it asks
            if store.check(["key"]):
                return store
        store.close()
        assert time.monotonic() < deadline_s, "the seat stays taken"


def test_torch_makes_groups_through_it(board: OpenRendezvous) -> None:
    def work(rank: int) -> list[float]:
        group = TensorParallelGroup(board.store(), "ranks", rank, 2, CPU, deterministic=False)
        total: list[float] = group.all_reduce(torch.full((2,), rank + 1.0)).tolist()
        return total

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[3.0, 3.0]] * 2


def test_a_group_keeps_the_store_it_may_ask_again(board: OpenRendezvous) -> None:
    """Torch holds the part of a store that is not Python; alone that part knows no key."""
    store = LinkStore(board.address, SECRET, 5)
    seen = weakref.ref(store)
    group = TensorParallelGroup(store, "alone", 0, 1, CPU, deterministic=False)
    del store
    gc.collect()
    assert seen() is not None
    del group
