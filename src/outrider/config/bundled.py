"""Which draft there is when nobody has named one. Decided here and nowhere else."""

from __future__ import annotations

from outrider.workers.weights.resolve import BUNDLED_DRAFT, BUNDLED_TARGET

AUTO = "auto"


def draft_beside(target_model: str, method: str | None, head_model: str | None) -> str | None:
    """The bundled draft beside the bundled target, unless somebody else proposes; else none."""
    is_wanted = target_model == BUNDLED_TARGET and method in (None, "draft") and head_model is None
    return BUNDLED_DRAFT if is_wanted else None
