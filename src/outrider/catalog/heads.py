"""The kinds of heads."""

from __future__ import annotations

from enum import StrEnum


class HeadKind(StrEnum):
    """The values are also proposer names, and vLLM's names of the same methods."""

    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MLP = "mlp_speculator"
