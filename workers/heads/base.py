"""The protocol of heads, whatever the format of their checkpoints."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.kernels.types import RaggedBatch
from outrider.workers.heads.spec import HeadSpec
from outrider.workers.models.kv import KVCache


class Head(Protocol):
    """Drafts from the target's hidden states.

    The target has features of token i, and the next token, i + 1, is known. From both the head
    computes the *state* of slot i, which predicts token i + 2. Drafting continues from the last
    slot: the state of a draft token follows from the state before it and the draft token itself.

    Methods run on the device of the weights, keep no history and never block; `batch` is the layout
    of the T slots, as for a decoder. A head without KV ignores `batch` and `kv`.
    """

    @property
    def spec(self) -> HeadSpec: ...

    def tile_tokens(self, query_len: int) -> int:
        """As `Decoder.tile_tokens`; 0: needs no tiles."""
        ...

    def extend(
        self, features: Tensor, next_ids: Tensor, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        """States [T, state_size] of slots from the features [T, spec.num_features] of their tokens
        and the next tokens, int64 or int32 [T]. Writes KV of all T slots."""
        ...

    def step(
        self, state: Tensor, ids: Tensor, level: int, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        """States [n, state_size] after one more token each, int64 or int32 [n]: the head's own
        draft tokens number `level`, from 1. Writes KV of n slots."""
        ...

    def logits(self, state: Tensor, level: int) -> Tensor:
        """float32 [n, vocab_size] by target ids, for draft token number `level + 1`; -inf for
        tokens that it never drafts."""
        ...
