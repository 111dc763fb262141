"""`quant_method: fp8`, as DeepSeek, Qwen and others publish their models, and AutoFP8 did."""

from __future__ import annotations

from outrider.workers.weights.formats.schemes import Fp8Scheme, Inputs, OneScheme
from outrider.workers.weights.formats.section import Section

METHOD = "fp8"


def read_schemes(config: Section) -> OneScheme:
    """With `weight_block_size` inputs are rounded in groups as wide as the blocks."""
    config.one_of("fmt", ("e4m3", "float8_e4m3fn", None))
    config.one_of("scale_fmt", ("float", None))
    if config.values.get("weight_block_size") is None:
        kind = Inputs(config.one_of("activation_scheme", ("dynamic", "static")))
        return OneScheme(METHOD, Fp8Scheme(kind))
    config.one_of("activation_scheme", ("dynamic",), "dynamic")
    blocks = config.sizes("weight_block_size")
    scheme = Fp8Scheme(Inputs.DYNAMIC, "weight_scale_inv", blocks, group_len=blocks[1])
    return OneScheme(METHOD, scheme)
