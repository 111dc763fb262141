"""KV without tensors: every slot holds the hash of the text up to the token written there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.errors import OutriderError

_TAKEN: Final = -1  # in a table: the block went to another row


class BrokenPlan(OutriderError):
    """A plan on which real workers would produce wrong text."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise BrokenPlan(message)


def text_hashes(tokens: Sequence[int], text: int = 0) -> list[int]:
    """The hash of the text up to each position; `text` is the hash of the tokens before."""
    hashes: list[int] = []
    for token in tokens:
        text = hash((text, token))
        hashes.append(text)
    return hashes


class FakeKV:
    """The KV of one pool, the block table of every row, and how much of each row is valid; and the
    head state kept *beside* the KV of rows that a head drafts for."""

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.computed: dict[int, int] = {}
        self._name = name
        self._block_size = block_size
        self._cells = [[0] * block_size for _ in range(num_blocks)]
        self._beside = [[0] * block_size for _ in range(num_blocks)]
        self._users: list[set[int]] = [set() for _ in range(num_blocks)]
        self._tables: dict[int, list[int]] = {}

    def open(self, row: int, num_cached: int) -> None:
        require(num_cached % self._block_size == 0, f"row {row}: {num_cached} tokens are cached")
        self.computed[row] = num_cached
        self._tables[row] = []

    def close(self, row: int) -> None:
        for block in self._tables.pop(row):
            self._forget(row, block)
        del self.computed[row]

    def extend_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Blocks of cached tokens may be shared; every other block must belong to the row alone."""
        if not blocks:
            return
        table, valid = self._tables[row], self.computed[row]
        where = f"{self._name} row {row}, blocks {list(blocks)} at {start}"
        require(start <= len(table), f"{where}: the table has {len(table)} and would have a gap")
        require(not table or start * self._block_size >= valid, f"{where}: valid KV is replaced")
        for block in table[start:]:
            self._forget(row, block)
        del table[start:]
        for index, block in enumerate(blocks, start):
            require(0 <= block < len(self._cells), f"{where}: there is no block {block}")
            if index * self._block_size >= valid:
                self._take_from_others(block, where)
            require(block not in table, f"{where}: block {block} is in the table already")
            self._users[block].add(row)
            table.append(block)

    def _take_from_others(self, block: int, where: str) -> None:
        """Freed lookahead blocks stay in tables until overwritten; valid KV must not be taken."""
        for other in self._users[block]:
            table = self._tables[other]
            index = table.index(block)
            is_valid = index * self._block_size < self.computed[other]
            require(not is_valid, f"{where}: block {block} holds KV of row {other}")
            table[index] = _TAKEN
        self._users[block].clear()

    def _forget(self, row: int, block: int) -> None:
        if block != _TAKEN:
            self._users[block].discard(row)

    def write(self, row: int, start: int, hashes: Sequence[int], *, beside: bool = False) -> None:
        for position, text in enumerate(hashes, start):
            block = self._block_at(row, position)
            if len(self._users[block]) > 1:
                raise BrokenPlan(
                    f"{self._name} row {row} writes block {block} of rows {self._users[block]}"
                )
            self._cells[block][position % self._block_size] = text
            self._beside[block][position % self._block_size] = text if beside else 0

    def read(self, row: int, hashes: Sequence[int], *, beside: bool = False) -> None:
        """A pass over a row reads all its KV: it must be that of the row's own text."""
        size = self._block_size
        kept = (self._cells, self._beside) if beside else (self._cells,)
        for start in range(0, len(hashes), size):
            block = self._block_at(row, start)
            expected = hashes[start : start + size]
            if any(cells[block][: len(expected)] != expected for cells in kept):
                raise BrokenPlan(
                    f"{self._name} row {row} reads KV of another text in block {block} at {start}"
                )

    def _block_at(self, row: int, position: int) -> int:
        table, index = self._tables[row], position // self._block_size
        if index >= len(table) or table[index] == _TAKEN:
            raise BrokenPlan(f"{self._name} row {row} has no block for position {position}")
        return table[index]
