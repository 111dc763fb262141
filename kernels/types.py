"""What the kernels take and promise: the ragged batch, the operation set, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from outrider.kernels.quantized import ActivationScheme, QuantizedWeight
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
    # Sequences with many queries have long tiles, sized by `max_query_len`. A long tile takes this
    # many places of short ones; all but the first are empty. 0: all tiles have one size.
    places_of_long_tile: int = 0


class TileColumn:
    """A row of `RaggedBatch.tiles`, int32 [num_tiles, 4]: consecutive queries of one sequence.

    A tile with no queries is to be skipped: a captured pass has room for more tiles than it needs.
    """

    FIRST_TOKEN = 0  # index in the pass
    NUM_TOKENS = 1
    POSITION = 2  # of the first token, and so the number of positions before it
    TABLE_ROW = 3  # of `block_tables`


Pass = Callable[[Tensor, RaggedBatch], Tensor]
"""A pass of a decoder: hidden states [T, hidden] in and out."""


class DraftTokens(NamedTuple):
    """Consecutive draft tokens of one row, and the draft's confidence in each."""

    tokens: list[int]
    confidences: list[float]


class RaggedLists(NamedTuple):
    """`RaggedBatch` as lists, for passes over so few tokens that tensors would take longer."""

    positions: list[int]
    slots: list[int]
    cu_query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]


class WholePasses(Protocol):
    """From tokens to tokens in one call: embedding, captured pass and head. Methods return None
    while the passes they need have not been captured yet."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of a pass."""
        ...

    def score(
        self, tokens: list[int], lists: RaggedLists, logits_indices: Sequence[int], vocab_size: int
    ) -> Tensor | None:
        """The logits of the tokens at `logits_indices`, ascending and at least one: float32
        [n, vocab], valid until the next pass."""
        ...

    def best(
        self, tokens: list[int], lists: RaggedLists, logits_indices: Sequence[int], vocab_size: int
    ) -> list[int] | None:
        """The argmax of each of these rows of logits, without computing all of them: the lowest id
        among equals, and `NO_TOKEN` where a logit is NaN or the highest infinite."""
        ...

    def draft(
        self,
        tokens: Sequence[int],
        start: int,
        blocks: Sequence[int],
        depth: int,
        vocab_size: int,
        least_survival: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> DraftTokens | None:
        """Draft `depth` tokens after `tokens`, greedily among the first `vocab_size`, or fewer:
        drafting ends with the first whose confidence, times those before it, is below
        `least_survival`. `tokens` are one row's and start at `start`; `blocks` has room for all but
        the last. With a `temperature` they are sampled with the shared noise of `seed`."""
        ...


class FusedLinear(Protocol):
    """A linear layer fused with the operations around it. The stream is the implementation's own
    type: the residual stream with its next norm half computed."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Any, next_norm: Tensor, eps: float) -> Any:
        """The stream after this product, `residual` being the stream before it; `eps` is that of
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
    """Operations of a fused pass beside `FusedLinear` and attention."""

    def can_rotate(self, head_dim: int) -> bool: ...

    def open_stream(self, ids: Tensor, table: Tensor, norm: Tensor) -> Any:
        """The stream of embedded tokens."""
        ...

    def open_embedded(self, embedded: Tensor, norm: Tensor, eps: float) -> Any:
        """`open_stream` of tokens [T, hidden] that were embedded before."""
        ...

    def add(self, x: Tensor, residual: Any, next_norm: Tensor, eps: float) -> Any:
        """`FusedLinear.add` of a product `x` that was computed before."""
        ...

    def close_stream(self, stream: Any, eps: float, index: Tensor | None) -> Tensor:
        """The normalised stream, [T, hidden], or of the tokens at `index` alone."""
        ...


class Packing(Protocol):
    """Linear layers whose weights are repacked first, into the caller's memory."""

    @property
    def layout(self) -> str:
        """Identifies the packed format: packed weights are only valid under the same name."""
        ...

    def packed_len(self, shape: tuple[int, int]) -> int:
        """Size of a packed [out, in] weight, in float32 values."""
        ...

    def pack(self, weight: Tensor | QuantizedWeight, out: Tensor) -> None: ...

    def packed_linear(self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Linear:
        """`Ops.linear` of the packed weight."""
        ...

    @property
    def stored(self) -> StoredKernels:
        """The same for weights in the form a checkpoint stores them."""
        ...


class Ops(Protocol):
    """The operations a decoder is made of.

    K and V caches are `[num_blocks, num_kv_heads, block_size, head_dim]`, contiguous, but blocks
    may be strided where the operations have `supports_strided_blocks`. The result for a token of a
    deterministic implementation does not depend, bit for bit, on which other tokens share the pass.
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
    def supports_strided_blocks(self) -> bool:
        """Whether the blocks of a cache need not be adjacent."""
        ...

    @property
    def fused(self) -> FusedOps | None:
        """Fused operations; with them, every `linear` is a `FusedLinear`."""
        ...

    @property
    def packing(self) -> Packing | None:
        """How weights may be packed once for many processes; None if they may not."""
        ...

    def tile_tokens(self, num_heads: int, num_kv_heads: int, query_len: int) -> int:
        """Queries per tile of a sequence with `query_len` of them; 0: attention needs no
        `RaggedBatch.tiles`."""
        ...

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        """Pack `weight` [out, in] once. The result may share or copy the weight; callers drop
        theirs."""
        ...

    def with_activations(self, linear: Linear, scheme: ActivationScheme) -> Linear:
        """`linear`, which this made, of inputs after `fake_quantize`."""
        ...

    def stacked(self, linears: Sequence[Linear]) -> Linear:
        """The outputs of several such layers of the same inputs, one after the other."""
        ...

    def captured(self, run: Pass) -> Pass:
        """`run`, perhaps faster: an implementation may capture its operations and replay them.

        `run` takes hidden states [T, hidden] and a batch, and consists of these operations alone,
        always the same for the same T.
        """
        ...

    def whole_passes(self, run: Pass, table: StoredTable, block_size: int) -> WholePasses | None:
        """For a decoder whose pass is `run`, as `captured` returned it, with `table` as embedding
        and tied head; None where that gains nothing."""
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
