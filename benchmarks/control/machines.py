"""Step costs of the simulated machines, and errors in the controller's cost estimates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.scheduler.costs import CostTable, StepCosts

_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Machine:
    """A target and a draft on a device."""

    name: str
    costs: StepCosts
    budget: int  # tokens of one pass
    step_limit_s: float | None = None

    def with_draft(self, share: float) -> Machine:
        """With a draft whose first pass for one row takes `share` of the target's for one token."""
        costs = self.costs
        factor = share * costs.verify.at(1) / costs.first_draft.at(1)
        changed = StepCosts(
            costs.verify,
            _scaled(costs.first_draft, factor),
            _scaled(costs.next_draft, factor),
            costs.context_s,
            costs.tile_tokens,
            costs.prefill_s * factor,
        )
        return Machine(f"{self.name} {share:.0%}", changed, self.budget, self.step_limit_s)


@dataclass(frozen=True, slots=True)
class CostError:
    """The error of the controller's cost estimates, and the noise of the true costs."""

    name: str = "exact"
    verify: float = 1.0  # estimate / truth
    draft: float = 1.0
    scatter: float = 0.0  # relative, of each size independently
    noise: float = 0.02  # relative, of every step
    outliers: float = 0.0  # share of slow steps
    slowdown: float = 6.0  # of these

    def estimate(self, costs: StepCosts, rng: np.random.Generator) -> StepCosts:
        def scaled_by_error(table: CostTable, factor: float) -> CostTable:
            sizes = len(table.sizes)
            each = factor * np.exp(self.scatter * rng.standard_normal(sizes))
            seconds = np.maximum.accumulate(np.asarray(table.seconds) * each)
            return CostTable(table.sizes, tuple(float(s) for s in seconds), table.is_padded)

        return StepCosts(
            scaled_by_error(costs.verify, self.verify),
            scaled_by_error(costs.first_draft, self.draft),
            scaled_by_error(costs.next_draft, self.draft),
            costs.context_s * self.verify,
            costs.tile_tokens,
            costs.prefill_s * self.draft,
        )


def _scaled(table: CostTable, factor: float) -> CostTable:
    return CostTable(table.sizes, tuple(factor * each for each in table.seconds), table.is_padded)


def _table(milliseconds: dict[int, float], *, is_padded: bool = False) -> CostTable:
    return CostTable(
        tuple(milliseconds), tuple(_MS * each for each in milliseconds.values()), is_padded
    )


def _captured(milliseconds: dict[int, float], sizes: tuple[int, ...]) -> CostTable:
    """Costs at every captured size, interpolated from the measured ones."""
    between = _table(milliseconds)
    return CostTable(sizes, tuple(between.at(size) for size in sizes), is_padded=True)


_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# Measured on an H200, attention's compute included.
_SIZES = (
    *(1, 2, 4, 8, 16, 32, 48, 64), *range(96, 257, 32), *range(320, 513, 64),
    *range(640, 1025, 128), *range(1280, 2049, 256),
)  # fmt: skip
H200 = Machine(
    "h200",
    StepCosts(
        _captured(
            {
                1: 3.95, 16: 4.1, 64: 4.45, 96: 4.8, 128: 5.0, 192: 6.0, 256: 6.4, 320: 7.8,
                384: 8.8, 448: 9.7, 512: 10.6, 640: 13.6, 768: 16.2, 896: 19.0, 1024: 20.1,
                1536: 30.3, 2048: 40.0,
            },
            _SIZES,
        ),
        _captured({1: 0.105, 16: 0.116, 64: 0.152, 128: 0.17, 256: 0.215}, _ROWS),
        _captured({1: 0.102, 16: 0.105, 64: 0.152, 128: 0.162, 256: 0.193}, _ROWS),
        context_s=3.25e-8,
        prefill_s=5.4e-7,
    ),
    budget=2048,
    step_limit_s=0.05,
)  # fmt: skip
CPU = Machine(
    "cpu",
    StepCosts(
        _table({1: 40.0, 2: 46.0, 4: 60.0, 6: 75.0, 8: 90.0, 16: 150.0, 512: 4118.0}),
        _table({1: 5.0, 4: 7.0, 16: 15.0, 512: 345.0}),
        _table({1: 5.0, 4: 7.0, 16: 15.0, 512: 345.0}),
        prefill_s=7e-4,
    ),
    budget=512,
)
COMPUTE_BOUND = Machine(
    "compute-bound",
    StepCosts(
        _table({1: 2.0, 2: 3.0, 2048: 2049.0}),
        _table({1: 0.06, 256: 2.0}),
        _table({1: 0.06, 256: 2.0}),
        prefill_s=8e-6,
    ),
    budget=2048,
)

EXACT = CostError()
COST_ERRORS = (
    EXACT,
    CostError("target low, draft high", 0.7, 1.3),
    CostError("target high, draft low", 1.3, 0.7),
    CostError("scattered", scatter=0.1, noise=0.08, outliers=0.01),
)
