"""Who proposes when nobody has been named. Decided here and nowhere else."""

from __future__ import annotations

from outrider.scheduler.policies import GOODPUT
from outrider.workers.proposers.base import NGRAM
from outrider.workers.weights.resolve import BUNDLED_DRAFT, BUNDLED_TARGET

AUTO = "auto"


def draft_beside(target_model: str, method: str | None, head_model: str | None) -> str | None:
    """The bundled draft beside the bundled target, unless somebody else proposes; else none."""
    is_wanted = (
        target_model == BUNDLED_TARGET and method in (None, AUTO, "draft") and head_model is None
    )
    return BUNDLED_DRAFT if is_wanted else None


def proposer_without_model(policy: str, device: str) -> str | None:
    """Who drafts for a target without draft or head: n-gram look-up on a CPU, where it costs next
    to nothing, and only under the policy that stops it where it does not pay. On a GPU a pass is as
    large as planned however few tokens were found, so it has to be asked for."""
    return NGRAM if device == "cpu" and policy == GOODPUT else None
