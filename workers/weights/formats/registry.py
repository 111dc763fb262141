"""The ways of quantizing checkpoints that are read, by their `quant_method`. Needs no torch."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider.checkpoints.files import read_json
from outrider.errors import ConfigError, ModelError
from outrider.workers.weights.formats import (
    awq,
    compressed_tensors,
    gptq,
    modelopt,
    official_fp8,
)
from outrider.workers.weights.formats.schemes import LayerSchemes
from outrider.workers.weights.formats.section import Section

READERS: Mapping[str, Callable[[Section], LayerSchemes]] = MappingProxyType(
    {
        compressed_tensors.METHOD: compressed_tensors.read_schemes,
        official_fp8.METHOD: official_fp8.read_schemes,
        modelopt.METHOD: modelopt.read_schemes,
        awq.METHOD: awq.read_schemes,
        gptq.METHOD: gptq.read_schemes,
    }
)
# Where older tools say what config.json does not.
_FILES = {
    modelopt.FILE: modelopt.METHOD,
    "quantize_config.json": gptq.METHOD,
    "quant_config.json": awq.METHOD,
}
_CONFIG_KEYS = ("quantization_config", "compression_config")  # the second, older


def schemes_of(config: Mapping[str, Any]) -> LayerSchemes | None:
    """What a `config.json` says; None if its weights are whole."""
    key = next((key for key in _CONFIG_KEYS if config.get(key)), None)
    if key is None:
        return None
    section = Section.of(key, config[key])
    method = section.values.get("quant_method")
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ModelError(
            f"the checkpoint's weights are quantized by {reprlib.repr(method)}, which is not "
            f"read; take one quantized by {', '.join(READERS)}, the checkpoint it was made from, "
            "whose weights quantization='fp8' or 'int8' rounds to 8 bits when they are "
            "loaded, or a GGUF file."
        )
    return reader(section)


def schemes_in(folder: Path) -> LayerSchemes | None:
    """What the files of a checkpoint say."""
    schemes = schemes_of(read_json(folder / "config.json"))
    for name, method in _FILES.items():
        path = folder / name
        if schemes is None and path.is_file():
            section = Section.of(name, read_json(path))
            if method != modelopt.METHOD or not modelopt.is_whole(section):
                schemes = READERS[method](section)
    return schemes


def check_agrees(schemes: LayerSchemes, quantization: str | None) -> None:
    """Refuse to quantize a checkpoint anew that is quantized in another way."""
    if quantization not in (None, schemes.kind):
        raise ConfigError(
            f"quantization is {quantization!r}, but the checkpoint's weights are {schemes.kind} "
            f"already (by {schemes.method}); leave it unset."
        )
