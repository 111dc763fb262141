"""Memory of the host through which outcomes and rounds go between the devices of target and draft.

With both on one host they share it: each device writes what the other waits for, and no host is on
the way. Otherwise each end has its own, and its host fills it with what messages bring.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.gpu.accept import outcome_width
from outrider.scheduler.types import StepPlan
from outrider.workers.gpu.stream_counter import StreamCounter
from outrider.workers.ranks.packed_outcome import Int64s, OutcomeRecord

logger = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
_SLOTS = 4  # of a ring; a slot is read before the target has its next round, so two would do
_LINE = 16  # int32s: counters that different processes write are on different cache lines
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process

_registered: list[Tensor] = []  # kept until the process ends: enqueued work may refer to it


class RingShape(NamedTuple):
    """Of the largest step; both ends must agree."""

    rows: int
    depth: int

    @property
    def outcomes(self) -> tuple[int, ...]:
        return self.rows, outcome_width(max(self.depth, 1))

    @property
    def rounds(self) -> tuple[int, ...]:
        """Tokens and confidences, as in `DeviceRows.drafted`."""
        return 2, self.rows, max(self.depth, 1)

    @property
    def size(self) -> int:
        """In int32s."""
        return sum(_LINE + _SLOTS * int(np.prod(each)) for each in (self.outcomes, self.rounds))


class Ring:
    """Values of the last steps, a slot each; a counter says up to which step they are there."""

    def __init__(self, memory: Tensor, shape: tuple[int, ...]) -> None:
        self._counter = StreamCounter(memory[:1])
        self._slots = memory[_LINE:].view(_SLOTS, *shape)

    def expect(self, step: int, into: Tensor) -> None:
        """Enqueue a wait for the values of a step, and their copy."""
        self._counter.wait_for(_count(step))
        into.copy_(self.values(step), non_blocking=True)

    def send(self, step: int, values: Tensor) -> None:
        """Enqueue bringing the values of a step; of the rows there are, the first."""
        self.values(step)[: len(values)].copy_(values, non_blocking=True)
        self._counter.signal(_count(step))

    def fill(self, step: int, values: NDArray[np.int32]) -> None:
        """Bring them now, in the place of a device."""
        self.values(step).numpy()[: len(values), ..., : values.shape[-1]] = values
        self._counter.advance(_count(step))

    def has(self, step: int) -> bool:
        return self._counter.has_reached(_count(step))

    def unblock(self) -> None:
        """Let what waits go on."""
        self._counter.unblock()

    def values(self, step: int) -> Tensor:
        """Of a step that is there, or where they go; on the host."""
        return self._slots[step % _SLOTS]


class LinkRings:
    """Both rings."""

    def __init__(self, memory: Tensor, shape: RingShape, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        split = _LINE + _SLOTS * int(np.prod(shape.outcomes))
        self.outcomes = Ring(memory[:split], shape.outcomes)
        self.rounds = Ring(memory[split:], shape.rounds)

    @classmethod
    def own(cls, shape: RingShape, device: torch.device) -> LinkRings:
        """Filled by this process alone."""
        memory = torch.zeros(shape.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(memory, shape, is_shared=False)

    def unblock(self) -> None:
        self.outcomes.unblock()
        self.rounds.unblock()


class SharedMemory:
    """A file in memory that another process of this host opens by its name."""

    def __init__(self, shape: RingShape) -> None:
        """`OSError` or `RuntimeError` if this host or device shares no memory."""
        self.name = f"outrider-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        descriptor = os.open(_FOLDER / self.name, flags, 0o600)
        try:
            os.ftruncate(descriptor, 4 * shape.size)
            self.rings = _mapped(descriptor, shape)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Once the other has opened it."""
        (_FOLDER / self.name).unlink(missing_ok=True)


def open_shared(name: str, shape: RingShape) -> LinkRings | None:
    """What another process created; None if this is another host, or it has another shape."""
    try:
        descriptor = os.open(_FOLDER / Path(name).name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        same_size = os.fstat(descriptor).st_size == 4 * shape.size
        return _mapped(descriptor, shape) if same_size else None
    except (OSError, RuntimeError) as error:
        logger.warning("this device shares no memory with the target's: %s", error)
        return None
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, shape: RingShape) -> LinkRings:
    memory = torch.frombuffer(mmap.mmap(descriptor, 4 * shape.size), dtype=torch.int32)
    _register(memory)
    return LinkRings(memory, shape, is_shared=True)


def _register(memory: Tensor) -> None:
    """Let the device address it."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.data_ptr(), 4 * memory.numel(), _PORTABLE)
    if int(error) or not memory.is_pinned():
        _forget_error()
        raise RuntimeError(f"cudaHostRegister failed with error {int(error)}")
    _registered.append(memory)


def _forget_error() -> None:
    """CUDA keeps it for the thread, and the next launch would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").zero_()


def in_plan_order(plan: StepPlan, records: Int64s) -> NDArray[np.int32]:
    """The outcomes that a device writes: a row for each of the plan, void if it does not sample."""
    places = {row.row: index for index, row in enumerate(plan.rows)}
    values = records[:, OutcomeRecord.BASE_LEN :]
    found = np.zeros((len(plan.rows), values.shape[1]), dtype=np.int32)
    found[[places[row] for row in records[:, OutcomeRecord.ROW].tolist()]] = values
    return found


def _count(step: int) -> int:
    return step + 1  # no step is there at first
