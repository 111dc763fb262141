"""Probability mass for top_p, in integers: identical to the last unit on every device.

Libraries' exp differ in the last bits, so this one consists of operations that round identically
everywhere: float32 sums and products in a fixed order, and shifts. Kernels do the same in
`outrider.kernels.gpu.filters`. Sums of integers do not depend on their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_BITS = 44
"""The most likely token has 2^44 units; 2^18 tokens as likely still fit an int64."""

LOG2_E = 1.4426950216293335
LEAST_POWER = -46.0
"""2^-46 of the most likely token is less than a unit, and counts as none."""

POWER_OF_TWO = (
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.0013264723820611835,
)
"""2^f = 1 + c0 f + c1 f^2 ... for f in [-0.5, 0.5], within 1e-7; like `LOG2_E` exactly float32."""

FLOAT32_BIAS = 127
FLOAT32_MANTISSA_BITS = 23


def mass_in_units(scores: Tensor, best: Tensor) -> Tensor:
    """int64, shaped as float32 `scores`: the mass of each, `best` being their row's highest."""
    powers = (scores - best).mul_(LOG2_E).clamp_(min=LEAST_POWER)
    whole = (powers + 0.5).floor_()
    fraction = powers.sub_(whole)
    mass = fraction * POWER_OF_TWO[-1]
    for factor in reversed(POWER_OF_TWO[:-1]):
        mass.add_(factor).mul_(fraction)
    mass.add_(1.0)
    exponents = whole.to(torch.int32).add_(FLOAT32_BIAS + UNIT_BITS)
    scale = exponents.bitwise_left_shift_(FLOAT32_MANTISSA_BITS).view(torch.float32)
    return mass.mul_(scale).to(torch.int64)
