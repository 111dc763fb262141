"""Runs a head over rows of the target; its KV uses the target's block tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.workers.heads.base import Head
from outrider.workers.heads.kv import head_kv
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.sampling.vocab import VocabPart


class HeadRunner:
    """A head beside a target's runner.

    The KV of slot i is at the place of token i in the target's blocks, so sharing, caching and
    freeing a block applies to both. Slots written while drafting are provisional: the target's pass
    overwrites them for committed tokens. `states` [rows, state_size] are those of each row's last
    slot, whether computed on the host or the device.
    """

    def __init__(self, head: Head, target: Runner) -> None:
        self.head = head
        self.target = target
        self.vocab_size = target.vocab_size
        self.vocab = VocabPart.whole(target.vocab_size)  # whole on every rank
        kv = target.kv
        self.kv = head_kv(
            head.spec, kv.num_blocks, kv.block_size, target.decoder.dtype, target.device
        )
        self.states = torch.zeros(
            target.num_rows, head.spec.state_size, dtype=target.decoder.dtype, device=target.device
        )
        target.expose_features(head.spec.layers, head.spec.kind.value)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @torch.inference_mode()
    def extend(self, chunks: Sequence[RowChunk], features: Tensor) -> Tensor:
        """States of the slots of these chunks, whose tokens are the *next* token of each slot."""
        ids = [token for chunk in chunks for token in chunk.tokens]
        batch = self.target.batch_of(chunks, self.head.tile_tokens)
        return self.head.extend(features, self.target.tensor(ids, torch.int64), batch, self.kv)

    @torch.inference_mode()
    def step(self, state: Tensor, chunks: Sequence[RowChunk], level: int) -> Tensor:
        """States after one more draft token each, number `level` from 1."""
        ids = [token for chunk in chunks for token in chunk.tokens]
        batch = self.target.batch_of(chunks, self.head.tile_tokens)
        return self.head.step(state, self.target.tensor(ids, torch.int64), level, batch, self.kv)

    @torch.inference_mode()
    def logits(self, state: Tensor, level: int) -> Tensor:
        return self.head.logits(state, level)[:, : self.vocab_size]
