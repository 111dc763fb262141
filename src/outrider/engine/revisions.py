"""Which commits of the hub a configuration means: asked once, and handed to all processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from outrider.config import EngineConfig
from outrider.config.bundled import AUTO
from outrider.errors import ModelError
from outrider.workers.heads.formats import kind_of
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
    head = config.head
    if head.model is not None:
        head = dataclasses.replace(head, revision=_settled(head.model, head.revision))
    return dataclasses.replace(config, target=target, draft=draft, head=head)


def settle_head(config: EngineConfig, *, may_ask: bool = True) -> EngineConfig:
    """A draft that turns out to be a head becomes the configuration's head, of the kind it is.
    Unless it `may_ask` the hub, only what is on this host is looked at."""
    draft, head = config.draft, config.head
    model, revision = head.model or draft.model, head.revision or draft.revision
    if model is None or head.method != AUTO or not (may_ask or Path(model).exists()):
        return config
    kind = kind_of(model, revision=revision, by_tensors=head.model is not None)
    if kind is None and head.model is None:
        return config
    if kind is None:
        raise ModelError(f"head.model is {model!r}, which is no head; name it as draft.model.")
    draft = dataclasses.replace(draft, model=None, revision=None, tensor_parallel=1)
    head = dataclasses.replace(head, model=model, revision=revision, method=kind.value)
    return dataclasses.replace(config, draft=draft, head=head)


def _settled(model: str, revision: str | None) -> str | None:
    return commit_of_source(model, revision) or revision
