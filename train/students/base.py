"""What every student can do, whichever its kind."""

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
from outrider.train.loss import Guesses
from outrider.train.packing import Batch, Seen

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

    def begin_from(self, folder: Path) -> None:
        """Take the weights of a checkpoint of the same kind and sizes, or of narrower MLPs or fewer
        layers where it `may_lack` them."""
        path = folder / self.weights_file
        try:
            theirs = load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"--begin-from is {str(folder)!r}, whose {self.weights_file} cannot be read "
                f"({error}); name a checkpoint of this kind."
            ) from None
        self.take_tokens(theirs)
        mine = self.tensors()
        if unknown := sorted(theirs.keys() - mine.keys()):
            raise ConfigError(
                f"--begin-from is {str(folder)!r}, whose {unknown[0]} this student has not; give "
                "the sizes it was made with."
            )
        for name, tensor in mine.items():
            if name not in theirs and self.may_lack(name):
                continue
            if name not in theirs or not _fits(name, theirs[name], tensor.cpu()):
                raise ConfigError(
                    f"--begin-from is {str(folder)!r}, whose {name} is not what this student has; "
                    "give the sizes it was made with."
                )
        with torch.no_grad():
            for name, tensor in mine.items():
                if tensor.is_floating_point() and name in theirs:
                    _take(name, theirs[name], tensor)

    def may_lack(self, name: str) -> bool:
        """Whether a checkpoint to begin from may be without this."""
        return False

    def take_tokens(self, theirs: Mapping[str, Tensor]) -> None:
        """The choice of tokens that a checkpoint makes, which other texts would make otherwise."""


def _fits(name: str, given: Tensor, own: Tensor) -> bool:
    """What counts or chooses tokens has to be the same."""
    if not own.is_floating_point():
        return torch.equal(given, own)
    if ".mlp." not in name or given.dim() != own.dim():
        return given.shape == own.shape
    return all(old <= new for old, new in zip(given.shape, own.shape, strict=True))


def _take(name: str, given: Tensor, own: Tensor) -> None:
    """Channels that a wider MLP has besides stay as they are and are not listened to at first, so
    that it begins as what the narrower one computes."""
    if given.shape != own.shape and name.endswith("down_proj.weight"):
        own.zero_()
    own[tuple(slice(size) for size in given.shape)].copy_(given)


def rope_entries(target: Mapping[str, Any]) -> dict[str, Any]:
    """How the target turns by position, for a config.json of any age."""
    given = target.get("rope_parameters") or {}
    theta = float(given.get("rope_theta") or target.get("rope_theta") or 10_000.0)
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
