"""Arguments of `LLM` and `Client`: one prompt or several, parameters for all or for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from outrider.errors import RequestError
from outrider.scheduler.params import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


def is_one(prompts: Any) -> TypeGuard[Prompt]:
    """Whether this is one prompt: text, a mapping or a list of token ids."""
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is {prompts!r}; it must be text, a list of token ids or a list of prompts."
        )
    if not isinstance(prompts, Sequence):
        return False
    return bool(prompts) and all(isinstance(item, int) for item in prompts)


def matched(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    """The parameters of each of `count` prompts; None if none were given."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, str) or not isinstance(params, Sequence | Mapping):
        raise RequestError(f"sampling_params is {params!r}; give SamplingParams(...).")
    for each in params:
        if not isinstance(each, SamplingParams):
            raise RequestError(
                f"sampling_params holds {each!r}; give SamplingParams(...), "
                "or SamplingParams.from_mapping({...}) for a dict."
            )
    if len(params) != count:
        raise RequestError(
            f"there are {count} prompts and {len(params)} sampling parameters; "
            "give one for all or one for each."
        )
    return list(params)
