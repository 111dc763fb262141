"""What a step has to say of its tokens' log-probabilities, on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.gpu.logprobs import LogprobColumn
from outrider.scheduler.types import TokenLogprobs
from outrider.workers.gpu.readback import copied_to_host

_RANK, _LOGPROB, _TOP = LogprobColumn.RANK, LogprobColumn.LOGPROB, LogprobColumn.TOP


class ToldLogprobs:
    """Copied behind the pass that found them; read once something behind the copy has ended."""

    def __init__(self, told: Tensor, vocab_size: int) -> None:
        """`told` is what `tell_logprobs` wrote."""
        self._ints = copied_to_host(told)
        self._vocab_size = vocab_size

    def of(self, first: int, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
        """Of tokens chosen at rows of logits from the `first` on."""
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
