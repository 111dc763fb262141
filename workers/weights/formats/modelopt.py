"""Checkpoints of NVIDIA's Model Optimizer: config.json, or hf_quant_config.json beside it."""

from __future__ import annotations

from outrider.workers.weights.formats.schemes import Fp8Scheme, Inputs, OneScheme
from outrider.workers.weights.formats.section import Section

METHOD = "modelopt"
FILE = "hf_quant_config.json"  # of older versions

_INPUTS = {"FP8": Inputs.STATIC, "FP8_PER_CHANNEL_PER_TOKEN": Inputs.DYNAMIC}


def is_whole(config: Section) -> bool:
    """Of the file: it may speak of nothing but the KV cache."""
    inner = config.section("quantization")
    return inner is not None and inner.values.get("quant_algo") is None


def read_schemes(config: Section) -> OneScheme:
    inner = config.section("quantization") or config
    return OneScheme(METHOD, Fp8Scheme(_INPUTS[inner.one_of("quant_algo", tuple(_INPUTS))]))
