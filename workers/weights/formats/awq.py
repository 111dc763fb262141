"""`quant_method: awq`, as AutoAWQ and llm-awq save it: four bits, zero points, groups."""

from __future__ import annotations

from outrider.workers.weights.formats.schemes import IntScheme, OneScheme, WordLayout
from outrider.workers.weights.formats.section import Section

METHOD = "awq"


def read_schemes(config: Section) -> OneScheme:
    config.one_of("version", ("gemm", "GEMM", None))
    config.one_of("zero_point", (True, False), True)  # they are stored in either case
    bits = config.one_of("bits", (4,), config.values.get("w_bit"))
    length = config.group_size("group_size" if "group_size" in config.values else "q_group_size")
    return OneScheme(METHOD, IntScheme(WordLayout.AWQ, bits, length, is_symmetric=False))
