"""The default proposer. Decided here and nowhere else."""

from __future__ import annotations

from outrider.catalog.proposers import NGRAM
from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET
from outrider.scheduler.policies import GOODPUT

AUTO = "auto"


def draft_beside(target_model: str, method: str | None, head_model: str | None) -> str | None:
    """The bundled draft for the bundled target, unless another proposer is set; else none."""
    is_used = (
        target_model == BUNDLED_TARGET and method in (None, AUTO, "draft") and head_model is None
    )
    return BUNDLED_DRAFT if is_used else None


def proposer_without_model(policy: str, device: str) -> str | None:
    """The proposer of a target without draft or head: n-gram lookup on a CPU, where it is nearly
    free, and only under the policy that stops it when it does not pay off. On a GPU a pass has its
    planned size however few tokens were found, so there it must be set explicitly."""
    return NGRAM if device == "cpu" and policy == GOODPUT else None
