"""What every head can do, whichever its checkpoint's format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.kernels.types import RaggedBatch
from outrider.workers.heads.spec import HeadSpec
from outrider.workers.models.kv import KVCache


class Head(Protocol):
    """Guesses on from what the target has computed.

    Of token i the target has features, and the token behind it, i + 1, is known. From both the head
    makes the *state* of slot i, which predicts token i + 2. Drafting goes on from the last slot: a
    draft's state is made from the state before it and the draft itself.

    Methods work on whatever device the weights are on, record no history of their own, and wait for
    nothing; `batch` says where each of the T slots stands, as for a decoder. A head without KV
    ignores `batch` and `kv`.
    """

    @property
    def spec(self) -> HeadSpec: ...

    def tile_tokens(self, query_len: int) -> int:
        """As `Decoder.tile_tokens`; 0: no tiles are needed."""
        ...

    def extend(
        self, features: Tensor, next_ids: Tensor, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        """States [T, state_size] of slots from features [T, spec.num_features] of their tokens and
        the tokens behind them, int64 or int32 [T]. Writes KV of all T slots."""
        ...

    def step(
        self, state: Tensor, ids: Tensor, level: int, batch: RaggedBatch, kv: KVCache | None
    ) -> Tensor:
        """States [n, state_size] behind one more token each, int64 or int32 [n], which are the
        head's own drafts number `level` from 1 on. Writes KV of n slots."""
        ...

    def logits(self, state: Tensor, level: int) -> Tensor:
        """float32 [n, vocab_size] by target ids, -inf of tokens that it never guesses, for draft
        number `level + 1`."""
        ...
