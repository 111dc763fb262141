"""Which commits of the hub a configuration means: asked once, and handed to all processes."""

from __future__ import annotations

import dataclasses

from outrider.config import EngineConfig
from outrider.workers.weights.resolve import at_commit, commit_of_source


def settle_revisions(config: EngineConfig) -> EngineConfig:
    """With commits in the place of branches and tags, so that whoever gets it later, on whatever
    host, has the same models. Has nothing to ask where that is so already."""
    target, draft = config.target, config.draft
    target = dataclasses.replace(target, revision=_settled(target.model, target.revision))
    if target.tokenizer is not None:
        tokenizer = at_commit(target.tokenizer, commit_of_source(target.tokenizer, None))
        target = dataclasses.replace(target, tokenizer=tokenizer)
    if draft.model is not None:
        draft = dataclasses.replace(draft, revision=_settled(draft.model, draft.revision))
    return dataclasses.replace(config, target=target, draft=draft)


def _settled(model: str, revision: str | None) -> str | None:
    return commit_of_source(model, revision) or revision
