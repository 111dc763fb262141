"""`quant_method: gptq`, as AutoGPTQ and GPTQModel save it: groups, in any order."""

from __future__ import annotations

from outrider.errors import ModelError
from outrider.workers.weights.formats.schemes import IntScheme, OneScheme, WordLayout
from outrider.workers.weights.formats.section import Section

METHOD = "gptq"
_SKIPPED = "-:"  # layers that stay whole, which their tensors say, too
_PACKINGS = {"gptq": WordLayout.GPTQ, "gptq_v2": WordLayout.GPTQ_V2}


def read_schemes(config: Section) -> OneScheme:
    dynamic = config.section("dynamic")
    if dynamic is not None and not all(key.startswith(_SKIPPED) for key in dynamic.values):
        raise ModelError(
            f"{config.name}.dynamic gives layers numbers of bits of their own, which is not "
            "supported; take a checkpoint whose layers are alike."
        )
    key = next((key for key in ("checkpoint_format", "format") if config.values.get(key)), "format")
    packing = _PACKINGS[config.one_of(key, tuple(_PACKINGS), "gptq")]
    bits = config.one_of("bits", (4, 8))
    return OneScheme(METHOD, IntScheme(packing, bits, config.group_size("group_size"), False))
