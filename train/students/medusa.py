"""Medusa: parallel heads, each drafting one token further from the same hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.train.loss import DraftOutputs
from outrider.train.packing import PackedBatch, TeacherStates
from outrider.train.settings import MedusaSizes
from outrider.train.students.base import Student
from outrider.train.teacher import Teacher


class _Block(nn.Module):
    """x + SiLU(Wx + b), initially x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaStudent(Student):
    """Head k predicts token i + k + 2 from position i; each starts as the target's LM head."""

    weights_file = "medusa_lm_head.safetensors"

    def __init__(self, sizes: MedusaSizes, teacher: Teacher, target: str) -> None:
        super().__init__()
        self._sizes, self._target = sizes, target
        vocab_size, width = teacher.head.shape
        self._shape = vocab_size, width
        self.heads = nn.ModuleList()
        for _ in range(sizes.heads):
            head = nn.Linear(width, vocab_size, bias=False)
            with torch.no_grad():
                head.weight.copy_(teacher.head.float().cpu())
            self.heads.append(nn.Sequential(*(_Block(width) for _ in range(sizes.layers)), head))

    def draft_outputs(self, batch: PackedBatch, teacher_states: TeacherStates) -> DraftOutputs:
        hidden = teacher_states.hidden.float()
        heads: list[Any] = list(self.heads)
        draft_indices = range(len(heads))
        return DraftOutputs(
            [head[:-1](hidden) for head in heads],
            [head[-1].weight for head in heads],
            list(draft_indices),
            [1 + draft_index for draft_index in draft_indices],
            [self._sizes.decay**draft_index for draft_index in draft_indices],
        )

    def tensors(self) -> dict[str, Tensor]:
        return {name.removeprefix("heads."): value for name, value in self.state_dict().items()}

    def config(self) -> dict[str, Any]:
        vocab_size, width = self._shape
        return {
            "architectures": ["MedusaModel"],
            "base_model_name_or_path": self._target,
            "hidden_size": width,
            "medusa_num_heads": self._sizes.heads,
            "medusa_num_layers": self._sizes.layers,
            "model_type": "medusa",
            "num_heads": self._sizes.heads,
            "num_hidden_layers": self._sizes.layers,
            "vocab_size": vocab_size,
        }
