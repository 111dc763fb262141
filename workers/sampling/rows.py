"""The sampling constants of one request, and its logit rows in a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.seeds import signed64
from outrider.scheduler.params import SamplingParams, is_greedy
from outrider.scheduler.types import RowInit


class RowSampler:
    """The constants of one request's sampling, built once when the request takes a row.

    Nothing here changes from step to step: what depends on the text is computed from the text of
    the `LogitSpan`, so a restart, a preemption or a rejected draft token needs no repair. Token ids
    beyond `vocab_size` (a draft's vocabulary may be padded less) are ignored. `held` are the ids
    whose scores this process has: column 0 of its logits is `held.start`; all by default.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_len: int,
        stop_ids: Sequence[int],
        bad_word_ids: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
        held: range | None = None,
    ) -> None:
        self.params = params
        self.seed = signed64(seed)
        self.prompt_len = prompt_len
        self.vocab_size = vocab_size
        self.held = range(vocab_size) if held is None else held
        self.device = device
        self.is_greedy = is_greedy(params)
        self.temperature = 1.0 if self.is_greedy else float(params.temperature)
        self.top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self.top_p = params.top_p
        self.log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self.has_filters = not self.is_greedy and (
            self.top_k > 0 or params.top_p < 1 or params.min_p > 0
        )
        self.has_bias = bool(params.logit_bias)
        self.has_penalties = params.has_penalties
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else frozenset(self._in_vocabulary(allowed))
        self._stop_ids = self._in_vocabulary(stop_ids) if params.min_tokens else ()
        self._bad_words = tuple(
            (tuple(word[:-1]), word[-1]) for word in bad_word_ids if word and word[-1] < vocab_size
        )
        self._longest_bad_prefix = max((len(prefix) for prefix, _ in self._bad_words), default=0)
        self.has_allowed = self._allowed is not None
        # A draft's vocabulary may lack every allowed id.
        self.can_choose = self._allowed is None or bool(self._allowed)
        # Whether some token may be banned at some position, beyond those not allowed.
        self.has_bans = bool(self._stop_ids or self._bad_words)
        self.changes_logits = (
            self.has_bias or self.has_penalties or self.has_allowed or self.has_bans
        )
        self.is_plain_greedy = self.is_greedy and not self.changes_logits
        self.wants_best_only = self.is_plain_greedy and params.logprobs is None

    @classmethod
    def from_init(
        cls, init: RowInit, vocab_size: int, device: torch.device, held: range | None = None
    ) -> RowSampler:
        return cls(
            init.params,
            init.seed,
            init.prompt_len,
            init.stop_ids,
            init.bad_word_ids,
            vocab_size,
            device,
            held,
        )

    @cached_property
    def bias(self) -> tuple[Tensor, Tensor]:
        """int64 columns and float32 values of `logit_bias`, for ids in `held`."""
        ids = [token for token in self.params.logit_bias if token in self.held]
        values = [self.params.logit_bias[token] for token in ids]
        return self._columns(ids), torch.tensor(values, dtype=torch.float32, device=self.device)

    @cached_property
    def allowed(self) -> Tensor:
        """int64 columns of `allowed_token_ids`, for ids in `held`."""
        return self._columns(sorted(token for token in self._allowed or () if token in self.held))

    def banned_ids(self, span: LogitSpan, num_drafts: int) -> set[int]:
        """Tokens that may not follow the committed text and the first `num_drafts` drafts.

        `bad_words` match output only, and ban the token that would complete a word. Bans that
        would leave no allowed token are dropped: a request must be able to continue.
        """
        num_output = span.base_len + num_drafts - self.prompt_len
        banned = set(self._stop_ids) if num_output < self.params.min_tokens else set()
        if self._bad_words:
            start = max(self.prompt_len, span.base_len - self._longest_bad_prefix)
            tail = (*span.tokens[start:], *span.drafts[:num_drafts])
            for prefix, last in self._bad_words:
                if not prefix or tail[-len(prefix) :] == prefix:
                    banned.add(last)
        if len(banned) >= self.vocab_size or (
            self._allowed is not None and self._allowed <= banned
        ):
            return set()
        return banned

    def _columns(self, ids: Sequence[int]) -> Tensor:
        columns = [token - self.held.start for token in ids]
        return torch.tensor(columns, dtype=torch.int64, device=self.device)

    def _in_vocabulary(self, ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(token for token in ids if token < self.vocab_size)


@dataclass(slots=True)
class LogitSpan:
    """The consecutive logit rows of one request in one pass.

    Row j predicts the token at absolute position `base_len + j` and has seen the committed text
    and the first j drafts. `tokens` may be any sequence; a buffer of int64 (`array("q")`, a numpy
    array) is read without a copy.
    """

    sampler: RowSampler
    tokens: Sequence[int]  # committed: prompt and output
    drafts: Sequence[int] = ()
    # [len(drafts), vocab]: what the draft tokens were sampled from. None: q is one-hot.
    draft_q: Tensor | None = None

    @property
    def base_len(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        return len(self.drafts) + 1

    def text(self) -> NDArray[np.int64]:
        """Committed tokens, then drafts."""
        committed = np.asarray(self.tokens, dtype=np.int64)
        if len(self.drafts) == 0:
            return committed
        return np.concatenate((committed, np.asarray(self.drafts, dtype=np.int64)))


class LogitRow(NamedTuple):
    """One row of logits and what it predicts. A tuple, because a pass may hold thousands."""

    slot: int  # which row of the logits tensor
    span: LogitSpan
    sampler: RowSampler
    num_drafts: int  # how many of the span's drafts it has seen
    position: int  # absolute, prompt counted, of the token it predicts


def logit_rows(spans: Sequence[LogitSpan]) -> list[LogitRow]:
    """Every row of every span, in order, as a target pass returns them."""
    rows: list[LogitRow] = []
    for span in spans:
        slot, base_len = len(rows), len(span.tokens)
        for j in range(len(span.drafts) + 1):
            rows.append(LogitRow(slot + j, span, span.sampler, j, base_len + j))
    return rows


def last_rows(spans: Sequence[LogitSpan]) -> list[LogitRow]:
    """The last row of each span, as a drafting step returns them."""
    return [
        LogitRow(slot, span, span.sampler, len(span.drafts), len(span.tokens) + len(span.drafts))
        for slot, span in enumerate(spans)
    ]
