"""The MLP speculator: a small recurrent network over the tokens drafted so far."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.train.loss import DraftOutputs
from outrider.train.modules import linear
from outrider.train.packing import PackedBatch, TeacherStates
from outrider.train.settings import MlpSizes
from outrider.train.students.base import Student
from outrider.train.teacher import Teacher

_EPS = 1e-6


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, _EPS) + self.bias


class MlpStudent(Student):
    """Tied: all draft positions share one embedding, norm and head, and all but the first share a
    projection."""

    def __init__(self, sizes: MlpSizes, teacher: Teacher) -> None:
        super().__init__()
        vocab_size, width = teacher.head.shape
        inner = sizes.inner or width
        self._sizes, self._shape, self._inner = sizes, (vocab_size, width), inner
        num_own = 1 if sizes.tied else sizes.predict
        num_projections = min(2, sizes.predict) if sizes.tied else sizes.predict
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(num_own))
        self.proj = nn.ModuleList(
            linear(width if index == 0 else inner, inner) for index in range(num_projections)
        )
        self.ln = nn.ModuleList(_Norm(inner) for _ in range(num_own))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(num_own))
        for table in (*self.emb, *self.head):
            nn.init.normal_(table.weight, std=inner**-0.5)
        state_weight = 0.5 ** (0.5 / sizes.predict)
        self._token_share = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight

    def draft_outputs(self, batch: PackedBatch, teacher_states: TeacherStates) -> DraftOutputs:
        state = teacher_states.hidden.float()
        if self._sizes.scale_input:
            state = functional.rms_norm(state, state.shape[-1:], None, _EPS) / math.sqrt(2)
        states = []
        for draft_index in range(self._sizes.predict):
            own = 0 if self._sizes.tied else draft_index
            projection = self.proj[min(draft_index, len(self.proj) - 1)]
            next_tokens = batch.ids.roll(-1 - draft_index, 1).flatten()
            mixed = projection(state) + self.emb[own](next_tokens) * self._token_share
            state = functional.gelu(self.ln[own](mixed))
            states.append(state)
        draft_indices = range(self._sizes.predict)
        tables: list[Any] = [head.weight for head in self.head]
        return DraftOutputs(
            states,
            tables,
            [0 if self._sizes.tied else draft_index for draft_index in draft_indices],
            [1 + draft_index for draft_index in draft_indices],
            [self._sizes.decay**draft_index for draft_index in draft_indices],
        )

    def tensors(self) -> dict[str, Tensor]:
        return {f"speculator.{name}": value for name, value in self.state_dict().items()}

    def config(self) -> dict[str, Any]:
        vocab_size, width = self._shape
        predict = self._sizes.predict
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "emb_dim": width,
            "inner_dim": self._inner,
            "model_type": "mlp_speculator",
            "n_candidates": predict,
            "n_predict": predict,
            "scale_input": self._sizes.scale_input,
            "tie_weights": self._sizes.tied,
            "top_k_tokens_per_head": [1] * predict,
            "torch_dtype": "bfloat16",
            "vocab_size": vocab_size,
        }
