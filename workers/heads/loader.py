"""Loads a head by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.checkpoints.files import read_json
from outrider.errors import ModelError
from outrider.kernels.types import Ops
from outrider.workers.heads.base import Head
from outrider.workers.heads.configs import Eagle3Config, MlpConfig
from outrider.workers.heads.eagle3 import Eagle3Head
from outrider.workers.heads.formats import head_config, not_a_head
from outrider.workers.heads.medusa import MedusaHead
from outrider.workers.heads.mlp_speculator import MlpSpeculatorHead
from outrider.workers.heads.weights import HeadWeights, head_folder, open_weights
from outrider.workers.models.names import names_of
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.checkpoint import checkpoint_folder
from outrider.workers.weights.safetensors_source import SafetensorsSource


def load_head(
    source: str | Path,
    target_spec: ModelSpec,
    target_source: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: Ops,
    max_position: int | None = None,
    revision: str | None = None,
    target_revision: str | None = None,
    target_embedding: Tensor | None = None,
) -> Head:
    """Read all weights of the head in `source`, in any format; it must fit the target.

    `max_position` is the longest sequence served, by default the target's. A head without an
    embedding shares `target_embedding`. If that is None, the target's is read again: a rank of a
    tensor-parallel target holds only a part of it, but a whole head.
    """
    folder = head_folder(source, revision)
    weights = open_weights(folder, dtype, device)
    config = head_config(read_json(folder / "config.json"), weights.names, target_spec)
    if config is None:
        raise not_a_head(source)
    config.spec.check_fits(target_spec)
    if isinstance(config, Eagle3Config):
        positions = max_position or target_spec.max_position
        table = _TargetEmbedding(target_spec, target_source, target_revision, target_embedding)
        return Eagle3Head(config, weights, ops, positions, table)
    if isinstance(config, MlpConfig):
        return MlpSpeculatorHead(config, weights, ops)
    return MedusaHead(config, weights, ops)


@dataclass(frozen=True, slots=True)
class _TargetEmbedding:
    """The target's whole embedding, for a head without one."""

    spec: ModelSpec
    source: str | Path
    revision: str | None
    present: Tensor | None

    def __call__(self, config: Eagle3Config, weights: HeadWeights) -> Tensor:
        target, own_size = self.spec, config.layer.hidden_size
        if own_size != target.embed_size:
            raise ModelError(
                "this eagle3 head has no tensor 'embed_tokens.weight', and the target's embedding "
                f"of size {target.embed_size} does not fit its hidden size {own_size}; get the "
                "complete checkpoint again."
            )
        if self.present is not None:
            return self.present
        folder = checkpoint_folder(self.source, self.revision)
        stored = SafetensorsSource(folder, weights.dtype, weights.device)
        shape = (target.vocab_size, target.embed_size)
        return stored.read(f"{names_of(target.family).embed}.weight", shape)
