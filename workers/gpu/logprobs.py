"""The log-probabilities of a step's tokens, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.gpu.logprobs import LogprobColumn
from outrider.scheduler.types import TokenLogprobs
from outrider.workers.gpu.readback import copied_to_host

_RANK, _LOGPROB, _TOP = LogprobColumn.RANK, LogprobColumn.LOGPROB, LogprobColumn.TOP


class LogprobsReadback:
    """Copied after the pass that computed them; to be read once a later event has completed."""

    def __init__(self, table: Tensor, vocab_size: int) -> None:
        """`table` is the output of `report_logprobs`."""
        self._ints = copied_to_host(table)
        self._vocab_size = vocab_size

    def of(self, first: int, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
        """For tokens chosen at consecutive logit rows, starting with `first`."""
        ints = self._ints[first : first + len(tokens)]
        floats = ints.view(torch.float32)
        end = _TOP + 2 * min(num_top, self._vocab_size)
        return tuple(
            TokenLogprobs(
                token,
                values[_LOGPROB],
                numbers[_RANK],
                tuple(zip(numbers[_TOP:end:2], values[_TOP + 1 : end : 2], strict=True)),
            )
            for token, numbers, values in zip(tokens, ints.tolist(), floats.tolist(), strict=True)
        )
