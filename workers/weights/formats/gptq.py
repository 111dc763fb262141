"""`quant_method: gptq`, as AutoGPTQ and GPTQModel save it: groups, in any order."""

from __future__ import annotations

from outrider.errors import ModelError
from outrider.workers.weights.formats.schemes import IntScheme, OneScheme, WordLayout
from outrider.workers.weights.formats.section import Section

METHOD = "gptq"
_PACKINGS = {"gptq": WordLayout.GPTQ, "gptq_v2": WordLayout.GPTQ_V2}


def read_schemes(config: Section) -> OneScheme:
    if config.values.get("dynamic"):
        raise ModelError(
            f"{config.name}.dynamic gives layers numbers of bits of their own, which is not "
            "supported; take a checkpoint whose layers are alike."
        )
    packing = _PACKINGS[config.one_of("checkpoint_format", tuple(_PACKINGS), "gptq")]
    bits = config.one_of("bits", (4, 8))
    return OneScheme(METHOD, IntScheme(packing, bits, config.group_size("group_size"), False))
