"""KV blocks: reference counts, and the prefix cache of full blocks.

The target and the draft each have one pool of this class. A full block whose tokens are applied
is published under (its parent, its tokens): an exact key, so a hit is never a hash collision. The
parent of a first block is the salt of its request, so requests with different salts share nothing.
A published block without holders stays usable until the memory is needed, oldest first. A *bare*
block lacks what a head keeps beside the target's KV: only requests without a head can use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Node: TypeAlias = int | str
"""A block's parent: the node of a published block, `ROOT`, or the salt of a request."""

ROOT = 0  # the parent of a first block without a salt

_Key: TypeAlias = tuple[Node, tuple[int, ...]]


class BlockPool:
    """A fixed number of blocks, reference-counted, with a prefix cache on top."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._unused = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, unheld, oldest first
        self._holders = [0] * num_blocks
        self._key_of: list[_Key | None] = [None] * num_blocks
        self._published: dict[_Key, tuple[int, int]] = {}  # key -> (block, node)
        self._bare: set[int] = set()  # of the published ones
        self._next_node = ROOT + 1
        self.num_published = 0  # blocks so far, evicted ones included

    @property
    def num_free(self) -> int:
        return len(self._unused) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` private blocks, or None (and no change) if fewer are free."""
        unused = self._unused
        if count > len(unused) + len(self._idle):
            return None
        while len(unused) < count:
            self._forget_oldest()
        taken = unused[len(unused) - count :]
        del unused[len(unused) - count :]
        for block in taken:
            self._holders[block] = 1
        return taken

    def _forget_oldest(self) -> None:
        block, _ = self._idle.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        del self._published[key]
        self._key_of[block] = None
        self._bare.discard(block)
        self._unused.append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each. Later blocks go first, so that a prefix outlives its tail."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._key_of[block] is None:
                    self._unused.append(block)
                else:
                    self._idle[block] = None

    def match(
        self, tokens: Sequence[int], root: Node = ROOT, *, takes_bare: bool = True
    ) -> tuple[list[int], Node]:
        """Hold the longest prefix of `tokens` published under `root`; returns its blocks and its
        last node. Unless it `takes_bare` blocks, it ends before the first of these.

        At least one token is left over: the logits of the last one have to be computed.
        """
        held: list[int] = []
        node = root
        if not self.prefix_caching:
            return held, node
        size = self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            found = self._published.get((node, tuple(tokens[start : start + size])))
            if found is None or (found[0] in self._bare and not takes_bare):
                break
            block, node = found
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1
            held.append(block)
        return held, node

    def publish(
        self, block: int, parent: Node, tokens: Sequence[int], *, is_bare: bool = False
    ) -> int:
        """Publish a full block under its parent; returns its node.

        If the same text is already published from another block, that one stays and this block
        remains private: both hold the same KV. Only a bare block is replaced by one that is not,
        and is private from then on.
        """
        key = (parent, tuple(tokens))
        new = self._next_node
        present, node = self._published.setdefault(key, (block, new))
        if node == new:
            self._next_node += 1
            if is_bare:
                self._bare.add(block)
        elif present in self._bare and not is_bare:
            self._published[key] = (block, node)
            self._withdraw(present)
        else:
            return node
        self._key_of[block] = key
        self.num_published += 1
        return node

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Remove these from the prefix cache: their KV is corrupt."""
        for block in blocks:
            key = self._key_of[block]
            if key is not None:
                del self._published[key]
                self._withdraw(block)

    def _withdraw(self, block: int) -> None:
        self._key_of[block] = None
        self._bare.discard(block)
        if self._holders[block] == 0:
            del self._idle[block]
            self._unused.append(block)

    def parent_of(self, block: int) -> Node:
        """The node that a published block follows."""
        key = self._key_of[block]
        assert key is not None
        return key[0]

    def forget_published(self) -> None:
        """Drop the prefix cache: the KV behind it is gone (a restarted worker)."""
        for block in self._idle:
            self._unused.append(block)
        self._idle.clear()
        self._published.clear()
        self._bare.clear()
        self._key_of = [None] * self.num_blocks

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless `held` (block lists of all holders) explains every block."""
        holders = [0] * self.num_blocks
        for blocks in held:
            assert len(set(blocks)) == len(blocks), f"a table names a block twice: {blocks}"
            for block in blocks:
                holders[block] += 1
        assert holders == self._holders, "holders differ from the block tables"
        free = [*self._unused, *self._idle]
        assert len(set(free)) == len(free), "a block is free twice"
        assert all(holders[block] == 0 for block in free), "a held block is free"
        used = sum(1 for count in holders if count)
        assert used + len(free) == self.num_blocks, "free + used is not the total"
        for key, (block, _) in self._published.items():
            assert self._key_of[block] == key, f"block {block} is published under another key"
        assert sum(key is not None for key in self._key_of) == len(self._published)
        assert all(self._key_of[block] is not None for block in self._bare), "bare, not published"
