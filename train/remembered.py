"""What the teacher has seen of every text: it is asked once for each, not in every epoch.

A token's states depend on its own document alone, wherever that is packed; some kilobytes of them a
token fit beside a student on a GPU for tens of millions of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.train.packing import Batch, Seen

SHARE_OF_FREE = 0.7  # of the device's memory, when a training begins


class RememberedPasses:
    """`see` of batches that say where their tokens stand among all of a training."""

    def __init__(self, see: Callable[[Batch], Seen], num_records: int, num_tokens: int) -> None:
        self._see = see
        self._num_tokens = num_tokens
        self._known = [False] * num_records
        self._hidden: Tensor | None = None
        self._features: Tensor | None = None
        self._has_room = True

    def __call__(self, batch: Batch) -> Seen:
        if batch.places is None or not self._has_room:
            return self._see(batch)
        places = batch.places.flatten()
        if self._hidden is not None and all(self._known[number] for number in batch.records):
            features = None if self._features is None else self._features[places]
            return Seen(self._hidden[places], features)
        seen = self._see(batch)
        self._note(batch, places, seen)
        return seen

    def _note(self, batch: Batch, places: Tensor, seen: Seen) -> None:
        if self._hidden is None and not self._make_room(seen):
            return
        assert self._hidden is not None
        self._hidden[places] = seen.hidden
        if self._features is not None and seen.features is not None:
            self._features[places] = seen.features
        for number in batch.records:
            self._known[number] = True

    def _make_room(self, seen: Seen) -> bool:
        """One more than there are tokens: what is left of rows goes there."""
        parts = [part for part in seen if part is not None]
        token_bytes = sum(part.shape[1] * part.element_size() for part in parts)
        free = _free_bytes(seen.hidden.device)
        self._has_room = (self._num_tokens + 1) * token_bytes <= free * SHARE_OF_FREE
        if not self._has_room:
            return False
        made = [part.new_zeros(self._num_tokens + 1, part.shape[1]) for part in parts]
        self._hidden = made[0]
        self._features = made[1] if len(made) > 1 else None
        return True


def _free_bytes(device: torch.device) -> int:
    """On a CPU none: there a training that goes on after a kill has the bits of one that was not
    killed, and would not, did it remember passes that were packed otherwise."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
