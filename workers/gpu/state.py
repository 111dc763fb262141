"""The state of every row on the device: text, draft tokens, block tables, sampling parameters.

The host plans one step ahead of what it has read back, so the authoritative state is here; the
host's `RowTable` lags one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.kernels.gpu.accept import TextTable
from outrider.kernels.gpu.adjust import AdjustTable
from outrider.kernels.gpu.sampling import SamplingTable
from outrider.kernels.gpu.tables import update_tables
from outrider.scheduler.types import RowInit
from outrider.workers.gpu.adjustments import RowAdjustment
from outrider.workers.gpu.readback import PinnedRing
from outrider.workers.sampling.rows import RowSampler

MAX_TABLE_UPDATES = 1024


class DeviceRows:
    """Tables by row number. Every change is enqueued after the passes already in flight."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        max_depth: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._max_blocks = -(-max_len // block_size)
        text = TextTable.create(num_rows, max_len, max(max_depth, 1), device)
        # Draft tokens and confidences, adjacent so that one copy moves both.
        self.drafted = torch.stack([text.drafts, torch.zeros_like(text.drafts)])
        self.text = replace(text, drafts=self.drafted[0])
        # float32: estimated probability that a draft token is accepted if all before it are.
        self.confidences = self.drafted[1].view(torch.float32)
        self.settings = SamplingTable.create(num_rows, device)
        self.adjustments = AdjustTable.create(num_rows, vocab_size, device)
        self._is_adjusted = [False] * num_rows
        # Top tokens to list beside a row's own; negative: no log-probabilities.
        self.num_top = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self._num_top: list[int | None] = [None] * num_rows
        tables = torch.zeros(2, num_rows, self._max_blocks, dtype=torch.int32, device=device)
        self.target_tables, self.draft_tables = tables[0], tables[1]
        self._updates: list[tuple[int, int, int]] = []
        self._uploaded = torch.zeros(MAX_TABLE_UPDATES, 3, dtype=torch.int32, device=device)
        self._staged = PinnedRing(self._uploaded)

    def set_text(self, row: int, tokens: Sequence[int], draft_computed: int) -> None:
        """Set the row's whole text and how much of it the draft has computed."""
        self.text.tokens[row, : len(tokens)] = self.upload(tokens)
        self._set_counts(row, len(tokens), draft_computed)

    def extend_text(self, row: int, base_len: int, tokens: Sequence[int], computed: int) -> None:
        """Append tokens that the host committed after the first `base_len`."""
        end = base_len + len(tokens)
        if tokens:
            ids = self.upload(tokens)
            self.text.tokens[row, base_len:end] = ids
            if self._is_adjusted[row]:
                self.adjustments.marks[row].index_add_(0, ids, torch.ones_like(ids))
        self._set_counts(row, end, computed)

    def admit(self, init: RowInit, sampler: RowSampler, *, is_adjusted: bool) -> None:
        """A request takes a row. `is_adjusted`: its logits are adjusted by the tables."""
        self.set_text(init.row, init.token_ids, init.draft_cached)
        self.set_sampling(init.row, sampler)
        adjustment = RowAdjustment.of(sampler, init.token_ids) if is_adjusted else None
        self.set_adjustment(init.row, adjustment)

    def set_draft_computed(self, row: int, computed: int) -> None:
        self.text.draft_computed[row : row + 1] = self.upload((computed,))

    def set_sampling(self, row: int, sampler: RowSampler) -> None:
        temperature = 0.0 if sampler.is_greedy else sampler.temperature
        self.settings.set_row(
            row, temperature, sampler.seed, sampler.top_k, sampler.top_p, sampler.log_min_p
        )

    def set_logprobs(self, row: int, num_top: int | None) -> None:
        if num_top != self._num_top[row]:
            self._num_top[row] = num_top
            self.num_top[row] = -1 if num_top is None else num_top

    def set_adjustment(self, row: int, adjustment: RowAdjustment | None) -> None:
        """The row's logit adjustments, set after its text; None: none."""
        table = self.adjustments
        if adjustment is not None:
            biases = adjustment.biases
            self._copy(table.marks[row], adjustment.marks)
            self._copy(table.biases[row, : len(biases)], biases)
            self._copy(table.penalties[row], adjustment.penalties)
            table.late_from[row] = adjustment.late_from
        is_adjusted = adjustment is not None
        if is_adjusted != self._is_adjusted[row]:
            table.is_used[row] = int(is_adjusted)
            self._is_adjusted[row] = is_adjusted

    def extend_target_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        self._extend(0, row, start, blocks)

    def extend_draft_table(self, row: int, start: int, blocks: Sequence[int]) -> None:
        self._extend(1, row, start, blocks)

    def flush_tables(self) -> None:
        """Copy the new blocks of all rows to the device; up to `MAX_TABLE_UPDATES` take no
        memory."""
        count = len(self._updates)
        if not count:
            return
        if count <= MAX_TABLE_UPDATES:
            staged = self._staged.take()[:count]
            staged.numpy()[:] = self._updates
            uploaded = self._uploaded[:count]
            uploaded.copy_(staged, non_blocking=True)
        else:
            uploaded = self.upload(self._updates)
        update_tables(uploaded, self.target_tables, self.draft_tables)
        self._updates = []

    def upload(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return self._to_device(torch.tensor(values, dtype=torch.int32))

    def _to_device(self, values: Tensor) -> Tensor:
        return self._pinned(values).to(self._device, non_blocking=True)

    def _copy(self, place: Tensor, values: Tensor) -> None:
        place.copy_(self._pinned(values), non_blocking=True)

    def _pinned(self, values: Tensor) -> Tensor:
        # From pageable memory a copy would synchronise with the device.
        return values.pin_memory() if self._device.type == "cuda" else values

    def _set_counts(self, row: int, length: int, computed: int) -> None:
        counts = self.upload((length, computed))
        self.text.lengths[row : row + 1] = counts[:1]
        self.text.draft_computed[row : row + 1] = counts[1:]

    def _extend(self, is_draft: int, row: int, start: int, blocks: Sequence[int]) -> None:
        first = row * self._max_blocks + start
        self._updates += [(is_draft, first + i, block) for i, block in enumerate(blocks)]
