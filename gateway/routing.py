"""Which replica a prompt goes to: where its prefix is likely cached, unless that one has too much.

Every gateway decides by itself, of what it sees. Two of them that see requests of the same kind
decide alike, since where a key belongs is a matter of hashes alone.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

# Of the mean load, what a replica may have before requests spill over to the next.
BOUND = 1.25
MOST_REMEMBERED = 1000  # requests
# A node ends every block of a prompt at first, and then as many blocks as a part of the depth, so
# that few nodes reach through any prompt.
_MOST_NODES = 96
_BLOCKS_PER_STRIDE = 10
_DIGEST_BYTES = 8


def _node_ends() -> tuple[int, ...]:
    ends = [0]
    while len(ends) <= _MOST_NODES:
        ends.append(ends[-1] + max(ends[-1] // _BLOCKS_PER_STRIDE, 1))
    return tuple(ends[1:])


NODE_ENDS = _node_ends()
"""In blocks: where the nodes of every prompt are."""


@dataclass(frozen=True, slots=True)
class Path:
    """A prompt by its prefixes: `nodes` are those that end whole blocks, the shortest first, each
    a hash of all before it; `whole` is all of it."""

    nodes: tuple[bytes, ...]
    whole: bytes


def path_of(prompt_ids: Sequence[int], block_size: int, salt: str = "") -> Path:
    """Of a prompt in blocks as the engine's cache has them under a salt."""
    size = array("I").itemsize
    data = array("I", prompt_ids).tobytes()
    num_blocks = len(prompt_ids) // block_size
    digest, start, nodes = salt.encode(), 0, []
    for end in NODE_ENDS:
        if end > num_blocks:
            break
        stop = end * block_size * size
        digest = _digest(digest, data[start:stop])
        start = stop
        nodes.append(digest)
    return Path(tuple(nodes), _digest(digest, data[start:]))


def _digest(before: bytes, data: bytes) -> bytes:
    return blake2b(before + data, digest_size=_DIGEST_BYTES).digest()


@dataclass(slots=True)
class _Node:
    num_requests: int = 0
    num_children: int = 0
    is_hot: bool = False


class PrefixMemory:
    """What the last requests had in common.

    A prompt's key is the part of it by which it is told from others. What a large share of all
    requests begin with, and then go on differently, is cached everywhere soon: so the key is what
    comes first behind the longest such prefix. A conversation keeps its key while it grows; a
    document that few ask about keeps all questions about it together.
    """

    def __init__(self, most_requests: int = MOST_REMEMBERED) -> None:
        self._most_requests = most_requests
        self._nodes: dict[bytes, _Node] = {}
        self._recent: deque[tuple[bytes, ...]] = deque()

    def remember(self, path: Path) -> None:
        if len(self._recent) >= self._most_requests:
            self._forget(self._recent.popleft())
        self._recent.append(path.nodes)
        parent: _Node | None = None
        for digest in path.nodes:
            node = self._nodes.get(digest)
            if node is None:
                node = self._nodes[digest] = _Node()
                if parent is not None:
                    parent.num_children += 1
            node.num_requests += 1
            parent = node

    def _forget(self, nodes: tuple[bytes, ...]) -> None:
        parent: _Node | None = None
        for digest in nodes:
            node = self._nodes[digest]
            node.num_requests -= 1
            if not node.num_requests:
                del self._nodes[digest]
                if parent is not None:
                    parent.num_children -= 1
            parent = node

    def key_of(self, path: Path, num_replicas: int) -> bytes:
        """Among so many replicas. A prompt that ends where others go on is known by all of it."""
        shared = 0  # nodes, of the longest prefix that is everywhere
        for depth, digest in enumerate(path.nodes, start=1):
            node = self._nodes.get(digest)
            if node is None:
                break
            if self._is_hot(node, num_replicas) and node.num_children > 1:
                shared = depth
        return path.nodes[shared] if shared < len(path.nodes) else path.whole

    def _is_hot(self, node: _Node, num_replicas: int) -> bool:
        """Half of a replica's share makes it so, half of that keeps it so: keys that change back
        and forth would be cached nowhere."""
        share = node.num_requests / len(self._recent)
        node.is_hot = share > (0.25 if node.is_hot else 0.5) / num_replicas
        return node.is_hot


def order_of(key: bytes, names: Iterable[str]) -> list[str]:
    """Replicas, where a key belongs first. Each has a rank of its own for the key, so that one
    that comes or goes moves only the keys that it gets or had."""

    def rank(name: str) -> bytes:
        return blake2b(name.encode(), key=key, digest_size=_DIGEST_BYTES).digest()

    return sorted(names, key=rank, reverse=True)


def choose(key: bytes, loads: Mapping[str, int]) -> str:
    """The first replica in the key's order that has less than its bound, of those whose `loads`
    in samples are given; there is always one."""
    bound = math.ceil(BOUND * (sum(loads.values()) + 1) / len(loads))
    return next(name for name in order_of(key, loads) if loads[name] < bound)
