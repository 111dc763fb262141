"""Sampling defaults from a checkpoint's generation_config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.checkpoints.files import read_json
from outrider.checkpoints.resolve import BUNDLED_TARGET, target_assets
from outrider.errors import RequestError
from outrider.scheduler.params import SamplingParams
from outrider.workers.weights.checkpoint import checkpoint_folder

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
# Its names and ours. As in vLLM they apply regardless of `do_sample`.
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def load_sampling_defaults(source: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """The model's default sampling parameters, by the names of `SamplingParams`."""
    # The file on the hub sets none. The model card (huggingface.co/HuggingFaceTB/
    # SmolLM2-135M-Instruct, "How to use") samples at temperature 0.2 and top_p 0.9.
    is_bundled = source == BUNDLED_TARGET
    path = (target_assets() if is_bundled else checkpoint_folder(source, revision)) / FILE
    return sampling_defaults(read_json(path), str(path)) if path.is_file() else {}


def sampling_defaults(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Omits values that are invalid for requests, with one warning."""
    defaults: dict[str, Any] = {}
    wrong: list[str] = []
    for name, own in NAMES.items():
        value = config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{own: value})
        except RequestError:
            wrong.append(f"{name} {value!r}")
        else:
            defaults[own] = value
    if wrong:
        logger.warning("%s has invalid values: %s; ignored", path, " and ".join(wrong))
    return defaults
