"""What tests of loading weights share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.workers.weights.safetensors_source import SafetensorsSource


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of matrices that are read from a checkpoint as float32, as they are read."""
    names: list[str] = []
    original = SafetensorsSource.read

    def read(
        self: SafetensorsSource, name: str, shape: tuple[int, ...], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if len(shape) > 1:
            names.append(name)
        return original(self, name, shape, *args, **kwargs)

    monkeypatch.setattr(SafetensorsSource, "read", read)
    return names
