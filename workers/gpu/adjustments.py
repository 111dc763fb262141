"""A request's logit adjustments, in the layout of `outrider.kernels.gpu.adjust`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.gpu.columns import Mark
from outrider.workers.sampling.rows import LogitSpan, RowSampler


class RowAdjustment(NamedTuple):
    """One row of an `AdjustTable`, on the host."""

    marks: Tensor  # int32 [vocab]
    biases: Tensor  # float32 [1 + number of biases]
    penalties: Tensor  # float32 [3]
    late_from: int

    @classmethod
    def of(cls, sampler: RowSampler, tokens: Sequence[int]) -> RowAdjustment:
        """For a row admitted with these tokens, prompt and output."""
        params = sampler.params
        late_from = sampler.prompt_len + params.min_tokens
        bias_ids = [token for token in params.logit_bias if token < sampler.vocab_size]
        biases = [0.0, *(params.logit_bias[token] for token in bias_ids)]
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)

        marks = _barred(sampler, late_from)
        marks[bias_ids] |= np.arange(1, len(biases), dtype=np.uint32) << Mark.BIAS_SHIFT
        text = np.asarray(tokens, dtype=np.int64)
        prompt, output = (
            part[part < sampler.vocab_size] for part in np.split(text, [sampler.prompt_len])
        )
        marks += np.bincount(output, minlength=sampler.vocab_size).astype(np.uint32)
        if params.repetition_penalty != 1.0:
            marks[prompt] |= Mark.IN_PROMPT
        return cls(
            torch.from_numpy(marks.view(np.int32)),
            torch.tensor(biases, dtype=torch.float32),
            torch.tensor(penalties, dtype=torch.float32),
            late_from,
        )


def _barred(sampler: RowSampler, late_from: int) -> NDArray[np.uint32]:
    """Marks of the tokens that are banned before `late_from`, and from there on."""
    marks = np.zeros(sampler.vocab_size, dtype=np.uint32)
    allowed = sampler.params.allowed_token_ids
    if allowed is not None:
        marks[:] = Mark.BARRED_EARLY | Mark.BARRED_LATE
        marks[[token for token in allowed if token < sampler.vocab_size]] = 0
    for bit, base_len in (
        (Mark.BARRED_EARLY, sampler.prompt_len),
        (Mark.BARRED_LATE, late_from),
    ):
        # The tokens of the text do not matter here, see `outrider.workers.gpu.exclusive`.
        banned = sampler.banned_ids(LogitSpan(sampler, range(base_len)), 0)
        marks[list(banned)] |= bit
    return marks
