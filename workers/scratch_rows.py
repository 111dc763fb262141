"""Rows beside those of requests: texts are tried on them, on a copy of a row's last KV."""

from __future__ import annotations

from outrider.workers.runner import Runner


class ScratchRows:
    """Share a row's full blocks and own copies of the blocks written from a position on.

    Their blocks are the last of the pool, which the scheduler does not know of.
    """

    def __init__(self, runner: Runner, num_rows: int, blocks_each: int) -> None:
        self._runner = runner
        self._rows = runner.add_rows(num_rows)
        self._blocks_each = blocks_each
        self._first_block = runner.kv.num_blocks - num_rows * blocks_each
        self._block_size = runner.kv.block_size

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> int:
        """Its row of the runner."""
        return self._rows[number]

    def fits(self, start: int, end: int) -> bool:
        """Whether a scratch row can be written from position `start` up to `end`."""
        num_blocks = -(-end // self._block_size) - start // self._block_size
        return num_blocks <= self._blocks_each and end <= self._runner.max_model_len

    def fork(self, source: int, number: int, start: int, end: int) -> int:
        """The row of scratch row `number`, which continues `source`: it has its own copy of the
        positions from `start` to `end`, and can be written behind."""
        runner, size = self._runner, self._block_size
        row, table = self._rows[number], runner.table(source)
        first, last = start // size, -(-end // size)
        own = self._own_blocks(number)
        runner.extend_table(row, 0, table[:first])
        runner.extend_table(row, first, own)
        runner.kv.copy_blocks(table[first:last], own[: last - first])
        return row

    def copy_back(self, number: int, row: int, start: int, end: int) -> None:
        """Give `row` the KV of a scratch row from position `start` to `end`."""
        runner, size = self._runner, self._block_size
        own, first, last = runner.table(self._rows[number]), start // size, -(-end // size)
        runner.kv.copy_blocks(own[first:last], runner.table(row)[first:last])

    def _own_blocks(self, number: int) -> list[int]:
        first = self._first_block + number * self._blocks_each
        return list(range(first, first + self._blocks_each))
