"""Runs a head over rows of the target: its KV lies in the target's own blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.workers.heads.base import Head
from outrider.workers.heads.kv import head_kv
from outrider.workers.runner import Chunk, Runner
from outrider.workers.sampling.vocab import VocabPart


class HeadRunner:
    """A head beside a target's runner.

    Slot i of a row has its KV where the target has that of token i, so a block that is shared,
    cached or given back is so for both. Slots that the head fed itself while it drafted hold no
    truth: they are written again from the target's pass, as the slots of committed tokens are.
    `states` [rows, state_size] are those of each row's last slot, whoever computed it.
    """

    def __init__(self, head: Head, target: Runner) -> None:
        self.head = head
        self.target = target
        self.vocab_size = target.vocab_size
        self.vocab = VocabPart.whole(target.vocab_size)  # of a group's ranks each has all of it
        kv = target.kv
        self.kv = head_kv(
            head.spec, kv.num_blocks, kv.block_size, target.decoder.dtype, target.device
        )
        self.states = torch.zeros(
            target.num_rows, head.spec.state_size, dtype=target.decoder.dtype, device=target.device
        )
        target.hand_over(head.spec.layers, head.spec.kind.value)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @torch.inference_mode()
    def extend(self, chunks: Sequence[Chunk], features: Tensor) -> Tensor:
        """States of the slots of these chunks, whose tokens are those *behind* each slot's own."""
        ids = [token for chunk in chunks for token in chunk.tokens]
        batch = self.target.batch_of(chunks, self.head.tile_tokens)
        return self.head.extend(features, self.target.tensor(ids, torch.int64), batch, self.kv)

    @torch.inference_mode()
    def step(self, state: Tensor, chunks: Sequence[Chunk], level: int) -> Tensor:
        """States behind one draft more of each, number `level` from 1 on."""
        ids = [token for chunk in chunks for token in chunk.tokens]
        batch = self.target.batch_of(chunks, self.head.tile_tokens)
        return self.head.step(state, self.target.tensor(ids, torch.int64), level, batch, self.kv)

    @torch.inference_mode()
    def logits(self, state: Tensor, level: int) -> Tensor:
        return self.head.logits(state, level)[:, : self.vocab_size]
