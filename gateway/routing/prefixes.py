"""Prefix-aware routing: a prompt goes to the replica that likely caches its prefix, unless that one
is overloaded.

Every gateway decides by itself, from the requests it sees. Gateways with similar traffic decide
alike: rendezvous hashing alone assigns keys to replicas.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

# The load of a replica over the mean, at which requests spill over to the next.
BOUND = 1.25
MAX_REMEMBERED = 1000  # requests
# Nodes end at every block at first, then at strides that grow with the depth, so that few nodes
# cover any prompt.
_MAX_NODES = 96
_BLOCKS_PER_STRIDE = 10
_DIGEST_BYTES = 8


def _node_ends() -> tuple[int, ...]:
    ends = [0]
    while len(ends) <= _MAX_NODES:
        ends.append(ends[-1] + max(ends[-1] // _BLOCKS_PER_STRIDE, 1))
    return tuple(ends[1:])


NODE_ENDS = _node_ends()
"""Where the nodes of every prompt end, in blocks."""


@dataclass(frozen=True, slots=True)
class Path:
    """A prompt as hashes of its prefixes: `nodes` of those that end at `NODE_ENDS`, the shortest
    first; `whole` of all of it."""

    nodes: tuple[bytes, ...]
    whole: bytes


def path_of(prompt_ids: Sequence[int], block_size: int, salt: str = "") -> Path:
    """The path of a prompt, in blocks of the engine's prefix cache under a salt."""
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
    """The shared prefixes of the last requests.

    A prompt's key is the part that distinguishes it. A prefix that a large share of all requests
    begin with, before they differ, is soon cached everywhere: so the key is the first node behind
    the longest such prefix. A conversation keeps its key while it grows; all questions about one
    document share a key while they are few.
    """

    def __init__(self, max_requests: int = MAX_REMEMBERED) -> None:
        self._max_requests = max_requests
        self._nodes: dict[bytes, _Node] = {}
        self._recent: deque[tuple[bytes, ...]] = deque()

    def remember(self, path: Path) -> None:
        if len(self._recent) >= self._max_requests:
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
        """The key of a prompt among this many replicas; a prompt that is itself a shared prefix is
        keyed by all of it."""
        shared = 0  # nodes of the longest prefix that is cached everywhere
        for depth, digest in enumerate(path.nodes, start=1):
            node = self._nodes.get(digest)
            if node is None:
                break
            if self._is_hot(node, num_replicas) and node.num_children > 1:
                shared = depth
        return path.nodes[shared] if shared < len(path.nodes) else path.whole

    def _is_hot(self, node: _Node, num_replicas: int) -> bool:
        """Hysteresis: hot from half of a replica's share of requests on, until a quarter; keys that
        flip would be cached nowhere."""
        share = node.num_requests / len(self._recent)
        node.is_hot = share > (0.25 if node.is_hot else 0.5) / num_replicas
        return node.is_hot


def order_of(key: bytes, names: Iterable[str]) -> list[str]:
    """Replicas by rendezvous hashing of the key: one that comes or goes moves only the keys that
    it gets or had."""

    def rank(name: str) -> bytes:
        return blake2b(name.encode(), key=key, digest_size=_DIGEST_BYTES).digest()

    return sorted(names, key=rank, reverse=True)


def choose(key: bytes, loads: Mapping[str, int]) -> str:
    """The first replica in the key's order below the load bound; there is always one. `loads` are
    in samples."""
    bound = math.ceil(BOUND * (sum(loads.values()) + 1) / len(loads))
    return next(name for name in order_of(key, loads) if loads[name] < bound)
