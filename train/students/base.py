"""The base class of students."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.train.loss import DraftOutputs
from outrider.train.packing import PackedBatch, TeacherStates

WEIGHTS, CONFIG = "model.safetensors", "config.json"


class Student(nn.Module, ABC):
    """Drafts at every position of a batch, from its tokens or from the teacher's states.

    `tensors` and `config` are the checkpoint, in the format that other software reads.
    """

    layers: tuple[int, ...] = ()  # of the target, whose inputs it reads
    weights_file = WEIGHTS
    is_model = False  # a draft model is saved with the tokenizer

    @abstractmethod
    def draft_outputs(self, batch: PackedBatch, teacher_states: TeacherStates) -> DraftOutputs: ...

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def config(self) -> dict[str, Any]: ...

    def save(self, folder: Path) -> None:
        """Save in bfloat16; tensors of integers and booleans as they are."""
        tensors = {
            name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None)
            for name, tensor in self.tensors().items()
        }
        made = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(made, str(folder / self.weights_file), metadata={"format": "pt"})
        text = json.dumps(self.config(), indent=1, sort_keys=True) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")

    def begin_from(self, folder: Path) -> None:
        """Load a checkpoint of the same kind and sizes; it may have narrower MLPs, and lack what
        `is_optional`."""
        path = folder / self.weights_file
        try:
            checkpoint = load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"--begin-from is {str(folder)!r}, whose {self.weights_file} cannot be read "
                f"({error}); name a checkpoint of this kind."
            ) from None
        self.take_draft_vocabulary(checkpoint)
        mine = self.tensors()
        if unknown := sorted(checkpoint.keys() - mine.keys()):
            raise ConfigError(
                f"--begin-from is {str(folder)!r}, whose {unknown[0]} this student lacks; give the "
                "sizes it was made with."
            )
        for name, tensor in mine.items():
            if name not in checkpoint and self.is_optional(name):
                continue
            if name not in checkpoint or not _shapes_match(name, checkpoint[name], tensor.cpu()):
                raise ConfigError(
                    f"--begin-from is {str(folder)!r}, whose {name} does not match this student's; "
                    "give the sizes it was made with."
                )
        with torch.no_grad():
            for name, tensor in mine.items():
                if tensor.is_floating_point() and name in checkpoint:
                    _copy_weights(name, checkpoint[name], tensor)

    def is_optional(self, name: str) -> bool:
        """Whether a checkpoint to begin from may lack this tensor."""
        return False

    def take_draft_vocabulary(self, checkpoint: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's draft vocabulary instead of the one counted in the data."""


def _shapes_match(name: str, source: Tensor, tensor: Tensor) -> bool:
    """Tensors of integers and booleans must be equal."""
    if not tensor.is_floating_point():
        return torch.equal(source, tensor)
    if ".mlp." not in name or source.dim() != tensor.dim():
        return source.shape == tensor.shape
    return all(old <= new for old, new in zip(source.shape, tensor.shape, strict=True))


def _copy_weights(name: str, source: Tensor, tensor: Tensor) -> None:
    """Zero a wider MLP's down projection first, so that it starts as the narrower one."""
    if source.shape != tensor.shape and name.endswith("down_proj.weight"):
        tensor.zero_()
    tensor[tuple(slice(size) for size in source.shape)].copy_(source)


def rope_entries(target: Mapping[str, Any]) -> dict[str, Any]:
    """The target's rotary settings, as old and new config.json files have them."""
    source = target.get("rope_parameters") or {}
    theta = float(source.get("rope_theta") or target.get("rope_theta") or 10_000.0)
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
