"""What the kernels take and promise: the ragged batch, the operation set, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from outrider.kernels.quantized import QuantizedWeight
from outrider.kernels.stored import StoredKernels, StoredTable

Linear = Callable[[Tensor], Tensor]
"""A packed linear layer: x [T, in_features] -> [T, out_features]."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Where the T tokens of one pass over B sequences stand; sequence b owns the tokens
    `cu_query_lens[b] : cu_query_lens[b + 1]`, the last ones of its context."""

    positions: Tensor  # int64 [T], absolute
    slots: Tensor  # int64 [T], block_id * block_size + offset, where this token's K and V go
    cu_query_lens: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B], KV length once this pass's tokens are written
    block_tables: Tensor  # int32 [B, max_blocks]
    max_query_len: int
    max_context_len: int
    tiles: Tensor | None = None  # for kernels that share work by tiles; see `TileColumn`
    # Sequences of many queries have tiles as suit `max_query_len`, each in so many places for tiles
    # as suit few, of which all but the first are nobody's. 0: all tiles are of one kind.
    places_of_long_tile: int = 0


class TileColumn:
    """A row of `RaggedBatch.tiles`, int32 [num_tiles, 4]: consecutive queries of one sequence.

    A tile with no queries is to be skipped: a recorded pass has room for more tiles than it needs.
    """

    FIRST_TOKEN = 0  # index in the pass
    NUM_TOKENS = 1
    POSITION = 2  # of the first token; it sees so many positions before its own
    TABLE_ROW = 3  # of `block_tables`


Pass = Callable[[Tensor, RaggedBatch], Tensor]
"""A pass of a decoder: hidden states [T, hidden] in and out."""


class Guesses(NamedTuple):
    """Tokens that follow each other, and how likely each was held to be."""

    tokens: list[int]
    confidences: list[float]


class Places(NamedTuple):
    """`RaggedBatch` as lists, for passes over so few tokens that tensors would take longer."""

    positions: list[int]
    slots: list[int]
    cu_query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]


class WholePasses(Protocol):
    """From tokens to tokens in one call: passes between embeddings and a head. None where passes
    over so many tokens, or over one for what is guessed, have not been run yet."""

    @property
    def max_tokens(self) -> int:
        """Of a pass."""
        ...

    def score(
        self, tokens: list[int], places: Places, wanted: Sequence[int], vocab_size: int
    ) -> Tensor | None:
        """What follows those of the tokens at the indices `wanted`, in order, of which there is at
        least one: float32 [n, vocab], valid until the next pass."""
        ...

    def best(
        self, tokens: list[int], places: Places, wanted: Sequence[int], vocab_size: int
    ) -> list[int] | None:
        """Of each of these scores, which need not be computed, the best token: the lowest among
        equals, and `NO_TOKEN` where a score is NaN or the best infinite."""
        ...

    def guess(
        self,
        tokens: Sequence[int],
        start: int,
        blocks: Sequence[int],
        depth: int,
        vocab_size: int,
        least_survival: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Guesses | None:
        """The `depth` likeliest tokens of the first `vocab_size` behind `tokens`, each given those
        before it, or fewer: one that holds with those before it with less than `least_survival` is
        the last. `tokens` are one row's and stand at `start`, and `blocks` has room for all but the
        last. With a `temperature` they are drawn by the shared noise of `seed`."""
        ...


class FusedLinear(Protocol):
    """A linear layer that does the work around it as well. `Stream` is the implementation's own:
    the residual stream with its next norm under way."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Any, next_norm: Tensor, eps: float) -> Any:
        """The stream behind this product, `residual` being the stream before it; `eps` is that of
        the next norm."""
        ...

    def norm_gated(self, stream: Any, eps: float) -> Tensor:
        """`silu_mul` of this product of the normalised stream."""
        ...

    def norm_rotate_store(
        self,
        stream: Any,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
        batch: RaggedBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        num_heads: int,
    ) -> Tensor:
        """`rotate_and_store` of this product of the normalised stream."""
        ...


class FusedOps(Protocol):
    """What a fused pass needs beside `FusedLinear` and attention."""

    def can_rotate(self, head_dim: int) -> bool: ...

    def open_stream(self, ids: Tensor, table: Tensor, norm: Tensor) -> Any:
        """The stream of embedded tokens."""
        ...

    def close_stream(self, stream: Any, eps: float, index: Tensor | None) -> Tensor:
        """The normalised stream, [T, hidden], or of the tokens at `index` alone."""
        ...


class Packing(Protocol):
    """Linear layers whose weights are put into another order first, in memory of the caller's."""

    @property
    def layout(self) -> str:
        """Names that order: weights that were packed under one name are of use under no other."""
        ...

    def packed_len(self, shape: tuple[int, int]) -> int:
        """Values of float32 that a weight of [out, in] takes."""
        ...

    def pack(self, weight: Tensor | QuantizedWeight, out: Tensor) -> None: ...

    def packed_linear(self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Linear:
        """What `Ops.linear` gives for the weight that was packed."""
        ...

    @property
    def stored(self) -> StoredKernels:
        """The same for weights in the form a checkpoint stores them."""
        ...


class Ops(Protocol):
    """The operations a decoder is made of.

    K and V caches are `[num_blocks, num_kv_heads, block_size, head_dim]`, contiguous, but blocks
    may lie apart where these are `for_blocks_apart`. The result for a token of a deterministic
    implementation does not depend, bit for bit, on which other tokens share the pass.
    """

    @property
    def name(self) -> str:
        """The backend's name, as `select_ops` takes it."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether a token's result is bitwise independent of the rest of the batch."""
        ...

    @property
    def for_blocks_apart(self) -> bool:
        """Whether there may be something else between two blocks of a cache."""
        ...

    @property
    def fused(self) -> FusedOps | None:
        """Operations that do more than one thing; with them, every `linear` is a `FusedLinear`."""
        ...

    @property
    def packing(self) -> Packing | None:
        """How weights may be packed once for many processes; None if they may not."""
        ...

    def tile_tokens(self, num_heads: int, num_kv_heads: int, query_len: int) -> int:
        """How many queries a tile of a sequence with so many of them holds; 0: attention needs no
        `RaggedBatch.tiles`."""
        ...

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        """Pack `weight` [out, in] once. The result may share or copy the weight; callers drop
        theirs."""
        ...

    def repeatable(self, run: Pass) -> Pass:
        """`run`, perhaps faster: an implementation may record what it does and repeat that.

        `run` takes hidden states [T, hidden] and a batch, and consists of these operations alone,
        always the same for the same T.
        """
        ...

    def whole_passes(self, run: Pass, table: StoredTable, block_size: int) -> WholePasses | None:
        """Of a decoder whose pass is `run`, made `repeatable`, between embeddings and a head that
        are both `table`; None where that gains nothing."""
        ...

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows `ids` [T] of `table` [vocab, hidden]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last axis of x [T, hidden]."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`(rms_norm(s), s)` with `s = x + residual`."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Layer normalisation over the last axis of x [T, hidden]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]: `silu(gate) * up`, the gate half first."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        batch: RaggedBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> Tensor:
        """Split qkv [T, (H + 2 KV) * D], normalise and rotate q and k, store k and v; q [T, H, D].

        `cos` and `sin` are float32 [max_position, D / 2], indexed by position, pairing elements j
        and j + D / 2; both None means no rotation. `q_norm` and `k_norm` [D] are RMS norm weights
        applied to each head before the rotation.
        """
        ...

    def attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: RaggedBatch,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """Causal attention of q [T, H, D] over the paged cache; [T, H * D].

        Query i of a sequence's n stands at position `context_len - n + i`. With `window > 0` it
        sees only the last `window` positions, its own included. Query head h reads KV head
        `h // (H / KV)`.
        """
        ...

    def logits(self, head: Linear, hidden: Tensor) -> Tensor:
        """float32 [n, vocab]: the product of a `linear` with hidden states [n, hidden]."""
        ...

    def gumbel_argmax(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor
    ) -> Tensor:
        """int64 [n]: `argmax_v(scores[n, v] + g(seed, stream, position, v))`, ties to the lowest v.

        A score of -inf is never chosen. See `outrider.kernels.noise`.
        """
        ...

    def gumbel_max(
        self, scores: Tensor, seeds: Tensor, streams: Tensor, positions: Tensor, first_id: int
    ) -> tuple[Tensor, Tensor]:
        """`gumbel_argmax` over a part of the vocabulary, the tokens from `first_id` on.

        Returns the best score of each row with its noise, float32 [n], and its column, int64 [n].
        The best of all parts is, bit for bit, what `gumbel_argmax` finds in the whole.
        """
        ...

    def probability_of(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """float32 [n]: softmax of each row of `scores` [n, vocab] at one of its `tokens` [n]."""
        ...
