"""Bounds of the numbers in a configuration, for `config.json` and GGUF headers alike.

They are far beyond any existing model. They prevent allocations for numbers in a damaged or hostile
file, and errors name the field.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import ModelError


@dataclass(frozen=True, slots=True)
class Bounds:
    lower: float
    upper: float
    is_whole: bool = True

    def check(self, name: str, value: Any) -> Any:
        """Return `value`, or raise a `ModelError` that names it `name`."""
        # Rejects bools and NaN, too.
        kinds = (int,) if self.is_whole else (int, float)
        if type(value) not in kinds or not self.lower <= value <= self.upper:
            kind = "a whole number" if self.is_whole else "a number"
            raise ModelError(
                f"{name} is {reprlib.repr(value)}, and has to be {kind} from {self.lower} to "
                f"{self.upper}; get the complete checkpoint again."
            )
        return value


_HEADS = Bounds(1, 2**16)
# Rotary tables use float32, which represents no more consecutive integers.
_POSITIONS = Bounds(1, 2**24)
_FACTOR = Bounds(1e-6, 1e6, is_whole=False)
DIVISOR = Bounds(1e-30, 1e30, is_whole=False)
COUNT = Bounds(0, 2**31 - 1)

BOUNDS = {
    "hidden_size": Bounds(1, 2**20),
    "word_embed_proj_dim": Bounds(1, 2**20),
    "intermediate_size": Bounds(1, 2**24),
    "ffn_dim": Bounds(1, 2**24),
    "num_hidden_layers": Bounds(1, 2**12),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": Bounds(1, 2**16),
    "vocab_size": Bounds(1, 2**24),
    "max_position_embeddings": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
    "max_window_layers": COUNT,
    "rms_norm_eps": Bounds(1e-30, 1, is_whole=False),
    "rope_theta": Bounds(2, 1e30, is_whole=False),
    "embedding_multiplier": _FACTOR,
    "residual_multiplier": _FACTOR,
    "attention_multiplier": _FACTOR,
    "logits_scaling": _FACTOR,
    "factor": _FACTOR,
    "low_freq_factor": _FACTOR,
    "high_freq_factor": _FACTOR,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "partial_rotary_factor": _FACTOR,
    "attention_factor": _FACTOR,
    # Some configurations use zero for none.
    "mscale": Bounds(0, 1e6, is_whole=False),
    "mscale_all_dim": Bounds(0, 1e6, is_whole=False),
}


def checked(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`config` with its numbers checked against their bounds; null counts as missing."""
    return {
        key: BOUNDS[key].check(f"{prefix}{key}", value) if key in BOUNDS else value
        for key, value in config.items()
        if value is not None or key not in BOUNDS
    }
