"""Moves the distributions of rejection sampling from GPU to GPU with NCCL.

The draft posts a tensor and then announces it on the proposal link; only then does the target post
its receive, so no kernel of it spins for a tensor that was not sent.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from outrider.links.rank_messages import proposal_meeting
from outrider.workers.groups.link_store import LinkStore
from outrider.workers.groups.process_group import Group, make_group

_TARGET, _DRAFT = 0, 1  # ranks in the group of two
_GREETING_TIMEOUT_S = 10.0
_POLL_S = 20e-6


class DeviceTransfer:
    """One side of the group of two. One that failed cannot be used again."""

    def __init__(
        self,
        store: LinkStore,
        number: int,
        device: torch.device,
        timeout_s: float,
        *,
        is_target: bool,
    ) -> None:
        rank = _TARGET if is_target else _DRAFT
        self._is_target = is_target
        self._peer = 1 - rank
        self._device = device
        self._timeout_s = timeout_s
        self._group: Group = make_group(store, proposal_meeting(number), rank, 2, device)
        self._pending: tuple[Tensor, object] | None = None  # a tensor must outlive its send

    def meet(self) -> None:
        """A first transfer, from the draft. NCCL connects then and blocks until both sides join,
        which must not happen within a step."""
        greeting = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self._is_target:
            self._take(greeting, _GREETING_TIMEOUT_S)
        else:
            self._finish(self._group.send([greeting], self._peer, 0), _GREETING_TIMEOUT_S)

    def post(self, tensor: Tensor) -> None:
        """Returns at once; the target receives it later."""
        on_device = tensor.to(self._device)
        self._pending = on_device, self._group.send([on_device], self._peer, 0)

    def receive(self, tensor: Tensor) -> Tensor:
        """An announced tensor of this shape, on the host. `RuntimeError` if it does not arrive."""
        return self._take(tensor, self._timeout_s)

    def close(self) -> None:
        """Abort the group without waiting: the other side may be dead."""
        self._group.abort()
        self._pending = None

    def _take(self, tensor: Tensor, limit_s: float) -> Tensor:
        on_device = tensor.to(self._device)
        self._finish(self._group.recv([on_device], self._peer, 0), limit_s)
        return on_device.cpu()

    def _finish(self, work: object, limit_s: float) -> None:
        """Wait on the host, with a timeout: NCCL's own `wait` only orders streams."""
        deadline_s = time.monotonic() + limit_s
        while not work.is_completed():  # type: ignore[attr-defined]
            if time.monotonic() > deadline_s:
                self._group.abort()
                raise RuntimeError(f"no distributions within {limit_s:g} s")
            time.sleep(_POLL_S)
        work.wait()  # type: ignore[attr-defined]
