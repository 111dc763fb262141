"""Options that captured passes do not support: such requests run in exclusive steps, on the host's
copy of the texts."""

from __future__ import annotations

from outrider.kernels.gpu.columns import Mark
from outrider.scheduler.params import is_greedy
from outrider.scheduler.types import Exclusive, RequestSpec, RowInit


def exclusivity(request: RequestSpec | RowInit, max_len: int, is_shared_noise: bool) -> Exclusive:
    """When the request needs exclusive steps, with texts of up to `max_len` tokens."""
    if not (is_shared_noise or is_greedy(request.params)):
        return (
            Exclusive.ALWAYS
        )  # rejection sampling needs the distribution that a draft token was drawn from
    if not _fits_table(request, max_len):
        return Exclusive.ALWAYS
    # prompt_logprobs needs the logits of all prompt tokens; captured passes make only the last.
    return Exclusive.NEVER if request.params.prompt_logprobs is None else Exclusive.PROMPT


def _fits_table(request: RequestSpec | RowInit, max_len: int) -> bool:
    """Whether an `AdjustTable` can express the request's logit adjustments.

    It cannot express a bad word of several tokens, whose ban depends on the text before.
    """
    params = request.params
    if len(params.logit_bias) > Mark.MAX_BIASES or any(len(w) > 1 for w in request.bad_word_ids):
        return False
    is_used = (
        params.logit_bias
        or params.has_penalties
        or params.allowed_token_ids is not None
        or request.bad_word_ids
        or (params.min_tokens and request.stop_ids)
    )
    return not is_used or max_len < 2**Mark.COUNT_BITS
