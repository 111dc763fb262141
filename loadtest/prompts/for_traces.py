"""Prompts with the lengths and shared prefixes of a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from outrider.errors import ConfigError
from outrider.loadtest.prompts.pool import PromptSegment, cut_prompt
from outrider.loadtest.requests import Prompt
from outrider.loadtest.traces import PREFIX_BLOCK, TraceRow


@dataclass(frozen=True)
class TracePrompts(Sequence[Prompt]):
    """One prompt per row, built on access: an hour of a trace would not fit in memory."""

    rows: Sequence[TraceRow]
    block_tokens: int  # scaled length of a block of the trace
    length_scale: float
    max_prompt_tokens: int | None
    max_output_tokens: int | None
    tokenizer: Any = field(repr=False)
    seed: int
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        row = self.rows[number]
        return cut_prompt(
            f"{self.name}/{row.number}",
            self.name,
            self._parts(row),
            tokenizer=self.tokenizer,
            seed=self.seed,
            output_tokens=min(row.output_tokens, self.max_output_tokens or row.output_tokens),
        )

    @property
    def num_clamped(self) -> int:
        """Number of prompts truncated to `max_prompt_tokens`."""
        limit = self.max_prompt_tokens
        return 0 if limit is None else sum(self._scaled(row) > limit for row in self.rows)

    def length(self, index: int) -> int:
        """Tokens of a prompt, without building it."""
        scaled = self._scaled(self.rows[index])
        return min(scaled, self.max_prompt_tokens or scaled)

    def describe(self) -> str:
        """How the trace's lengths were scaled, in a sentence."""
        text = f"{len(self)} prompts, {self.block_tokens} tokens for a block of {PREFIX_BLOCK}"
        if self.num_clamped:
            text += f", {self.num_clamped} cut to {self.max_prompt_tokens} tokens"
        return text + "."

    def _scaled(self, row: TraceRow) -> int:
        if not row.prefix_ids:
            return max(1, round(row.prompt_tokens * self.length_scale))
        # In whole blocks, rounded up, so that no block is lost.
        return math.ceil(row.prompt_tokens * self.block_tokens / PREFIX_BLOCK)

    def _parts(self, row: TraceRow) -> list[PromptSegment]:
        """Prefix blocks seeded by their id, then a remainder seeded by the row."""
        scaled = self._scaled(row)
        room = min(scaled, self.max_prompt_tokens or scaled)
        parts = []
        for block_id in row.prefix_ids:
            if room == 0:
                break
            parts.append(PromptSegment("block", block_id, min(room, self.block_tokens)))
            room -= parts[-1].tokens
        if room:
            parts.append(PromptSegment("row", row.number, room))
        return parts


def prompts_for_trace(
    rows: Sequence[TraceRow],
    *,
    tokenizer: Any = None,
    length_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
    seed: int = 0,
    name: str = "trace",
) -> TracePrompts:
    """Prompts of the rows' lengths times `length_scale`, at most `max_prompt_tokens` long.

    Equal prefix ids give equal blocks of tokens, so two prompts share exactly the prefix that
    their ids share; `seed` selects the blocks. With a tokenizer, prompts are token ids of exact
    length; without one, text of about that length. Both are natural text.
    """
    if not math.isfinite(length_scale) or length_scale <= 0:
        raise ConfigError(f"length_scale is {length_scale}; give a number above 0.")
    for limit, value in (
        ("max_prompt_tokens", max_prompt_tokens),
        ("max_output_tokens", max_output_tokens),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{limit} is {value}; give at least 1.")
    block = max(1, round(PREFIX_BLOCK * length_scale))
    return TracePrompts(
        rows, block, length_scale, max_prompt_tokens, max_output_tokens, tokenizer, seed, name
    )
