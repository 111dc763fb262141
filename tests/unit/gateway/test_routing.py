"""Where prompts go: keys, the order of replicas, and what a simulation makes of both."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.gateway.routing.prefixes import BOUND, PrefixMemory, choose, order_of, path_of

BLOCK = 16
NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
KEYS = st.binary(min_size=8, max_size=8)


def ids(number: int, count: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(50_000) for _ in range(count)]


def route(memory: PrefixMemory, prompt: Sequence[int], num_replicas: int = 2) -> bytes:
    path = path_of(prompt, BLOCK)
    memory.remember(path)
    return memory.key_of(path, num_replicas)


# -- the order of replicas --------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(KEYS, NAMES)
def test_the_order_has_every_replica_and_does_not_depend_on_theirs(
    key: bytes, names: list[str]
) -> None:
    order = order_of(key, names)
    assert sorted(order) == sorted(names)
    assert order == order_of(key, reversed(names))


@settings(max_examples=50, deadline=None)
@given(KEYS, NAMES)
def test_a_replica_that_goes_leaves_the_order_of_the_others(key: bytes, names: list[str]) -> None:
    gone, *left = names
    assert order_of(key, left) == [name for name in order_of(key, names) if name != gone]


@settings(max_examples=50, deadline=None)
@given(KEYS, st.dictionaries(st.text(max_size=8), st.integers(0, 500), min_size=1, max_size=12))
def test_nobody_is_given_more_than_the_bound(key: bytes, loads: dict[str, int]) -> None:
    chosen = choose(key, loads)
    assert loads[chosen] + 1 <= math.ceil(BOUND * (sum(loads.values()) + 1) / len(loads))
    better = order_of(key, loads)[: order_of(key, loads).index(chosen)]
    assert all(loads[name] >= loads[chosen] for name in better)


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_a_replica_more_takes_its_share_of_the_keys_and_moves_no_others(num_replicas: int) -> None:
    names = [f"replica {i}" for i in range(num_replicas)]
    keys = [random.Random(i).randbytes(8) for i in range(4000)]
    before = [order_of(key, names)[0] for key in keys]
    after = [order_of(key, [*names, "new"])[0] for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"new"}
    assert len(moved) / len(keys) == pytest.approx(1 / (num_replicas + 1), rel=0.15)
    assert max(Counter(before).values()) < 1.15 * len(keys) / num_replicas


# -- keys -------------------------------------------------------------------------------------


def test_a_conversation_keeps_its_key_while_it_grows() -> None:
    memory, text = PrefixMemory(), ids(1, 100)
    keys = set()
    for turn in range(30):
        text += ids(turn, 90)
        keys.add(route(memory, text))
    assert len(keys) == 1


@pytest.mark.parametrize("num_shared", [300, 3000, 20_000])
def test_a_system_prompt_that_everybody_has_does_not_keep_them_together(num_shared: int) -> None:
    """However long it is."""
    memory, system = PrefixMemory(), ids(0, num_shared)
    long = num_shared // 4 + 100  # longer than what a node far down spans
    keys = [route(memory, system + ids(user, long)) for user in range(1, 65)]
    assert len(set(keys[2:])) == 62
    again = [route(memory, system + ids(user, long) + ids(99, 50)) for user in range(1, 65)]
    assert again[2:] == keys[2:]


def test_questions_about_a_document_that_few_ask_about_stay_together() -> None:
    memory = PrefixMemory()
    documents = [ids(number, 400) for number in range(40)]
    for turn in range(10):
        for number, document in enumerate(documents):
            key = route(memory, document + ids(1000 * turn + number, 40))
            if turn:
                assert key == path_of(document, BLOCK).nodes[0]


def test_questions_about_a_document_that_everybody_asks_about_are_divided() -> None:
    memory, document = PrefixMemory(), ids(1, 400)
    keys = {route(memory, document + ids(1000 + turn, 40)) for turn in range(40)}
    assert len(keys) > 35


def test_prompts_shorter_than_a_block_are_told_apart_by_all_of_them() -> None:
    memory = PrefixMemory()
    assert len({route(memory, ids(number, 5)) for number in range(50)}) == 50
    assert route(memory, ids(3, 5)) == route(memory, ids(3, 5))


def test_a_share_that_goes_up_and_down_a_little_does_not_change_keys() -> None:
    memory, document = PrefixMemory(max_requests=100), ids(1, 160)
    keys = []
    for turn in range(2000):
        is_about_it = turn < 30 or turn % 5 == 0  # a fifth, where a quarter makes it hot
        if is_about_it:
            keys.append(route(memory, document + ids(turn % 3, 40)))
        else:
            route(memory, ids(10_000 + turn, 40))
    assert len(set(keys[60:])) == 3


def test_only_the_last_requests_are_remembered() -> None:
    memory = PrefixMemory(max_requests=50)
    for number in range(500):
        route(memory, ids(number, 600))
    assert len(memory._recent) == 50
    assert len(memory._nodes) == len({node for nodes in memory._recent for node in nodes})
    for number in range(50):
        route(memory, ids(number, 3))
    assert memory._nodes == {}


# -- a simulation -----------------------------------------------------------------------------


@dataclass(slots=True)
class Cache:
    """A replica's prefix cache: the chain hashes of blocks, the longest unused of which go."""

    num_blocks: int
    known: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def num_hits(self, chain: Sequence[int]) -> int:
        found = 0
        for block in chain:
            if block not in self.known:
                break
            self.known.move_to_end(block)
            found += 1
        return found

    def add(self, chain: Sequence[int]) -> None:
        for block in chain:
            self.known[block] = None
            self.known.move_to_end(block)
        while len(self.known) > self.num_blocks:
            self.known.popitem(last=False)


@dataclass(slots=True)
class Talk:
    text: list[int]
    num_turns: int = 0
    _chain: list[int] = field(default_factory=list)

    @property
    def chain(self) -> list[int]:
        """Of its whole blocks so far."""
        for start in range(len(self._chain) * BLOCK, len(self.text) - BLOCK + 1, BLOCK):
            before = self._chain[-1] if self._chain else 0
            self._chain.append(hash((before, *self.text[start : start + BLOCK])))
        return self._chain


class Simulation:
    """Conversations of several turns behind one system prompt, most of them running at any time."""

    TURNS, USERS, RUNNING = 8, 96, 64

    def __init__(self, num_replicas: int, num_blocks: int = 60_000) -> None:
        self.rng = random.Random(7)
        self.memory = PrefixMemory()
        self.caches = {f"{i}": Cache(num_blocks // num_replicas) for i in range(num_replicas)}
        self.loads = dict.fromkeys(self.caches, 0)
        self.system = self.tokens(300, 300)
        self.hits = self.looked_for = 0
        self.worst = 0.0  # of the largest load over the mean, when a request was placed

    def tokens(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(50_000) for _ in range(self.rng.randint(least, most))]

    def run(self, num_requests: int) -> Simulation:
        talks = [self.begun() for _ in range(self.USERS)]
        running: list[tuple[int, str, Talk]] = []
        now = num_begun = 0
        while num_begun < num_requests:
            now += 1
            for name, talk in [(name, talk) for end, name, talk in running if end <= now]:
                talks.append(self.finish(name, talk))
            running = [each for each in running if each[0] > now]
            while talks and len(running) < self.RUNNING:
                talk = talks.pop(self.rng.randrange(len(talks)))
                running.append((now + self.rng.randint(5, 20), self.place(talk), talk))
                num_begun += 1
        return self

    def begun(self) -> Talk:
        return Talk(self.system + self.tokens(20, 120))

    def place(self, talk: Talk) -> str:
        key = route(self.memory, talk.text, len(self.caches))
        name = choose(key, self.loads)
        self.loads[name] += 1
        total = sum(self.loads.values())
        if total >= self.RUNNING // 2:
            self.worst = max(self.worst, self.loads[name] * len(self.loads) / total)
        chain = talk.chain
        self.hits += self.caches[name].num_hits(chain)
        self.looked_for += len(chain)
        self.caches[name].add(chain)
        return name

    def finish(self, name: str, talk: Talk) -> Talk:
        self.loads[name] -= 1
        talk.text += self.tokens(10, 120)
        self.caches[name].add(talk.chain)
        talk.text += self.tokens(10, 120)
        talk.num_turns += 1
        return talk if talk.num_turns < self.TURNS else self.begun()

    @property
    def hit_rate(self) -> float:
        return self.hits / self.looked_for


def test_conversations_find_their_cache_with_several_replicas_as_with_one() -> None:
    alone = Simulation(1).run(1000)
    assert alone.hit_rate > 0.85
    for num_replicas in (2, 4):
        found = Simulation(num_replicas).run(1000)
        assert found.hit_rate > 0.95 * alone.hit_rate
        # Loads are whole numbers, and the one that was placed counts.
        assert found.worst <= BOUND + num_replicas / (Simulation.RUNNING // 2)


def test_prompts_with_nothing_in_common_are_spread() -> None:
    memory, loads = PrefixMemory(), dict.fromkeys("abcd", 0)
    for number in range(400):
        loads[choose(route(memory, ids(number, 100), 4), loads)] += 1
        assert max(loads.values()) <= math.ceil(BOUND * sum(loads.values()) / 4)
    assert min(loads.values()) > 60
