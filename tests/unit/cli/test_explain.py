"""What `outrider explain` says of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cli.explain import _outcome


@pytest.mark.parametrize(
    ("committed", "num_drafts", "said"),
    [(1, 0, "1 token with 0 drafts"), (2, 1, "2 tokens with 1 draft")],
)
def test_one_is_not_many(committed: int, num_drafts: int, said: str) -> None:
    step: Any = SimpleNamespace(
        committed=committed,
        num_drafts=num_drafts,
        num_prompt_tokens=0,
        draft_s=0.0,
        verify_s=0.02,
        tokens_per_s=None,
    )
    assert _outcome(step) == f"Then: {said} in 0.00 ms of drafting and 20.00 ms of verifying."
