"""What a request may ask for that the recorded passes cannot do: it then has steps of its own, on
the host's copy of the texts."""

from __future__ import annotations

from outrider.kernels.gpu.adjust import Mark
from outrider.scheduler.types import Apart, RequestSpec, RowInit
from outrider.workers.sampling.rows import is_greedy


def apart(asked: RequestSpec | RowInit, max_len: int, is_shared_noise: bool) -> Apart:
    """When the request's rows cannot run as recorded, texts being up to `max_len` long."""
    if not (is_shared_noise or is_greedy(asked.params)):
        return Apart.ALWAYS  # to reject a draft takes the distribution it was drawn from
    if not _fits_table(asked, max_len):
        return Apart.ALWAYS
    # Of every prompt token the logits are wanted; a recorded pass makes those of the last.
    return Apart.NEVER if asked.params.prompt_logprobs is None else Apart.PROMPT


def _fits_table(asked: RequestSpec | RowInit, max_len: int) -> bool:
    """Whether all that is asked of logits can be said in an `AdjustTable`.

    A ban on the last of several tokens cannot: it depends on the text before it.
    """
    params = asked.params
    if len(params.logit_bias) > Mark.MOST_BIASES or any(len(w) > 1 for w in asked.bad_word_ids):
        return False
    is_used = (
        params.logit_bias
        or params.has_penalties
        or params.allowed_token_ids is not None
        or asked.bad_word_ids
        or (params.min_tokens and asked.stop_ids)
    )
    return not is_used or max_len < 2**Mark.COUNT_BITS
