"""What every student can do, whichever its kind."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.train.loss import Guesses
from outrider.train.packing import Batch
from outrider.train.teacher import Seen

WEIGHTS, CONFIG = "model.safetensors", "config.json"


class Student(nn.Module, ABC):
    """Guesses for every row of a batch, from its tokens or from what the teacher has seen.

    `tensors` and `config` are its checkpoint, as the software that is used to it reads it.
    """

    layers: tuple[int, ...] = ()  # of the target, whose input it reads
    weights_file = WEIGHTS
    is_model = False  # a model of its own comes with its tokenizer

    @abstractmethod
    def guesses(self, batch: Batch, seen: Seen) -> Guesses: ...

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def config(self) -> dict[str, Any]: ...

    def save(self, folder: Path) -> None:
        """In bfloat16, but for what counts or chooses tokens."""
        tensors = {
            name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None)
            for name, tensor in self.tensors().items()
        }
        made = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(made, str(folder / self.weights_file), metadata={"format": "pt"})
        text = json.dumps(self.config(), indent=1, sort_keys=True) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")


def rope_entries(target: Mapping[str, Any]) -> dict[str, Any]:
    """How the target turns by position, for a config.json of any age."""
    given = target.get("rope_parameters") or {}
    theta = float(given.get("rope_theta") or target.get("rope_theta") or 10_000.0)
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
