"""Small checkpoints of heads in each public format, and a way to run a head over paged caches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import ragged_batch
from safetensors.torch import save_file
from torch import Tensor

from outrider.kernels.ops import select_ops
from outrider.kernels.types import RaggedBatch
from outrider.workers.heads.base import Head
from outrider.workers.heads.kv import head_kv
from outrider.workers.heads.loader import load_head
from outrider.workers.models.spec import ModelSpec

BLOCK_SIZE = 4
CPU = torch.device("cpu")
BACKENDS = ("torch", None)


def target_spec(
    hidden_size: int = 32, vocab_size: int = 96, num_layers: int = 12, **changes: Any
) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    return ModelSpec.from_hf(config | changes)


def load(
    folder: Path,
    target: ModelSpec,
    target_folder: Path | None = None,
    backend: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Head:
    ops = select_ops(device, dtype, backend=backend)
    source = target_folder or "/nowhere"
    return load_head(folder, target, source, dtype=dtype, device=device, ops=ops)


def write(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    file: str = "model.safetensors",
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / file)
    else:
        torch.save(dict(weights), folder / file)
    return folder


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Norms around 1, everything else large enough for every part to matter."""
    generator = torch.Generator().manual_seed(seed)

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith("weight")
        return 1 + 0.3 * values if is_norm else 0.2 * values

    return {name: make(name, shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Drafted:
    """Of one sequence: the states of its slots, then of each draft, and the drafts' logits."""

    states: Tensor  # [slots, size]
    draft_states: Tensor  # [depth - 1, size]
    logits: Tensor  # [depth, vocabulary]

    @property
    def drafts(self) -> list[int]:
        found: list[int] = self.logits.argmax(-1).tolist()
        return found


def assert_same(ours: Drafted, plain: Drafted) -> None:
    """Up to the rounding of float32, which is relative to the largest of a tensor: plain ones are
    computed in float64."""
    for name in ("states", "draft_states", "logits"):
        found, expected = getattr(ours, name), getattr(plain, name).float()
        largest = expected[expected.isfinite()].abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5 * max(largest, 1.0))
    assert ours.drafts == plain.drafts


class HeadRun:
    """Several sequences of different lengths in one cache, whose blocks lie scattered."""

    def __init__(
        self, head: Head, num_sequences: int, max_len: int, device: torch.device = CPU
    ) -> None:
        self._head = head
        self._device = device
        blocks_each = -(-max_len // BLOCK_SIZE)
        num_blocks = blocks_each * num_sequences
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
        self._tables = order.reshape(num_sequences, blocks_each).to(torch.int32)
        self._kv = head_kv(head.spec, num_blocks, BLOCK_SIZE, torch.float32, device)

    def draft(
        self, features: Sequence[Tensor], ids: Sequence[Tensor], depth: int, chunk: int
    ) -> list[Drafted]:
        """Extend all sequences, at most `chunk` slots of each a pass, then draft greedily."""
        states = self._extend(features, ids, chunk)
        lens = [len(each) for each in ids]
        state = torch.stack([each[-1] for each in states])
        stepped: list[Tensor] = []
        logits: list[Tensor] = []
        for level in range(depth):
            if level > 0:
                spans = [range(n + level - 1, n + level) for n in lens]
                batch = self._batch(spans, list(range(len(lens))))
                tokens = logits[-1].argmax(-1)
                state = self._head.step(state, tokens, level, batch, self._kv)
                stepped.append(state)
            logits.append(self._head.logits(state, level))
        empty = state.new_empty(len(lens), 0, state.shape[-1])
        behind = torch.stack(stepped, 1) if stepped else empty
        guesses = torch.stack(logits, 1)
        found = zip(states, behind, guesses, strict=True)
        return [Drafted(*(part.cpu() for part in each)) for each in found]

    def _extend(
        self, features: Sequence[Tensor], ids: Sequence[Tensor], chunk: int
    ) -> list[Tensor]:
        parts: list[list[Tensor]] = [[] for _ in ids]
        for first in range(0, max(map(len, ids)), chunk):
            rows = [row for row, each in enumerate(ids) if len(each) > first]
            spans = [range(first, min(first + chunk, len(ids[row]))) for row in rows]
            cuts = [slice(span.start, span.stop) for span in spans]
            found = self._head.extend(
                self._joined([features[row][cut] for row, cut in zip(rows, cuts, strict=True)]),
                self._joined([ids[row][cut] for row, cut in zip(rows, cuts, strict=True)]),
                self._batch(spans, rows),
                self._kv,
            )
            for row, span in zip(rows, spans, strict=True):
                parts[row].append(found[: len(span)])
                found = found[len(span) :]
        return [torch.cat(each) for each in parts]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).to(self._device)

    def _batch(self, spans: list[range], rows: list[int]) -> RaggedBatch:
        tile_size = self._head.tile_tokens(max(map(len, spans)))
        return ragged_batch(spans, self._tables[rows], BLOCK_SIZE, tile_size, self._device)
