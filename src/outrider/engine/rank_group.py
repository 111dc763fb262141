"""The ranks of one model as the engine sees them: started together, sent the same messages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from outrider.config import EngineConfig
from outrider.errors import OutriderError
from outrider.links.channel import Channel, wait_any
from outrider.links.codec import RANK_CODEC
from outrider.links.frames import LinkError
from outrider.links.gateway_messages import ProcessState, RankStatus
from outrider.links.listener import Arrival
from outrider.links.rank_messages import (
    Allocate,
    LoadWeights,
    RankDescription,
    RankFailed,
    RankSettings,
    Ready,
    Role,
    Setup,
    Stage,
    StepBounds,
    StopRank,
    WeightsLoaded,
)

M = TypeVar("M")
TRANSFER_SHARE = 1 / 3  # of `stall_timeout_s`, for the distributions of a round
Report = Callable[[str], None]
"""Takes a line of start-up progress."""


class RankError(OutriderError):
    """A rank has failed or disconnected, and its group with it."""


def rank_settings(config: EngineConfig, role: str) -> RankSettings:
    is_target = role == Role.TARGET
    part = config.target if is_target else config.draft
    assert part.model is not None
    return RankSettings(
        model=part.model,
        revision=part.revision,
        device=part.device
        if role == Role.TARGET or part.device != "auto"
        else config.target.device,
        dtype=part.dtype if is_target or part.dtype != "auto" else config.target.dtype,
        quantization=part.quantization,
        cpu_kernels=config.cpu_kernels,
        deterministic=config.deterministic,
        num_threads=config.num_threads,
        block_size=config.cache.block_size,
        verification=config.speculation.verification,
        ngram_min=config.speculation.ngram_min,
        ngram_max=config.speculation.ngram_max,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        has_fixed_kv=config.cache.kv_cache_gb is not None,
        log_level=config.log_level,
        log_format=config.log_format,
        transfer_timeout_s=config.stall_timeout_s * TRANSFER_SHARE,
        head_model=config.head.model if is_target else None,
        head_revision=config.head.revision if is_target else None,
        has_draft=is_target and config.draft.model is not None,
        hears_stages=True,
    )


class RankGroup:
    """Links to all ranks of one role. Any failure of a rank raises `RankError`.

    Each exchange of a start may take `start_timeout_s`. `meeting` is the group's unique prefix in
    the rendezvous store.
    """

    def __init__(
        self,
        role: str,
        meeting: str,
        arrivals: Sequence[Arrival],
        report: Report,
        start_timeout_s: float,
    ) -> None:
        self.role = role
        self.meeting = meeting
        self.channels = [arrival.channel for arrival in arrivals]
        self.start_timeout_s = start_timeout_s
        self.described: list[RankDescription] = []
        self.loaded: list[WeightsLoaded] = []
        self.ready = Ready()  # of the first rank
        self._hellos = [arrival.hello for arrival in arrivals]
        self._report = report

    def describe(self, settings: RankSettings) -> RankDescription:
        """Send every rank its settings; returns the first rank's description."""
        shares = Counter(hello.host for hello in self._hellos)
        seen: Counter[str] = Counter()
        for hello, channel in zip(self._hellos, self.channels, strict=True):
            share, index = shares[hello.host], seen[hello.host]
            seen[hello.host] += 1
            self._send(channel, Setup(settings, self.meeting, share, index))
        self.described = [self._receive(channel, RankDescription) for channel in self.channels]
        return self.described[0]

    def load(self, max_position: int | None, bounds: StepBounds) -> None:
        """Load the weights on all ranks concurrently. `bounds` are those of the largest step."""
        self.send(LoadWeights(max_position or 0, bounds))
        self.loaded = [self._receive(channel, WeightsLoaded) for channel in self.channels]
        for rank, loaded in enumerate(self.loaded):
            self._report(f"{self.role} rank {rank}: weights loaded in {loaded.seconds:.1f} s")

    def allocate(self, num_blocks: int, num_rows: int, max_model_len: int, vocab_size: int) -> None:
        self.send(Allocate(num_blocks, num_rows, max_model_len, vocab_size))
        self.ready, *_ = [self._receive(channel, Ready) for channel in self.channels]

    def send(self, message: object) -> None:
        """Send a message to every rank, encoded once."""
        self.send_encoded(RANK_CODEC.encode(message))

    def send_encoded(self, payload: bytes) -> None:
        for channel in self.channels:
            try:
                channel.send_encoded(payload)
            except LinkError as error:
                raise RankError(str(error)) from error

    def send_to_first(self, message: object) -> None:
        self._send(self.channels[0], message)

    def answer(self, timeout_s: float) -> object:
        """The next message of the first rank. Meanwhile the other ranks may only fail."""
        first = self.channels[0]
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if len(self.channels) == 1 or first.has_buffered:
                return self._checked(first, left_s)
            ready = wait_any(self.channels, left_s)
            if not ready:
                raise self.hung(timeout_s)
            for channel in ready:
                message = self._checked(channel, left_s)
                if channel is first:
                    return message

    def poll(self) -> object | None:
        """The next message of the first rank if it has arrived, else None."""
        first = self.channels[0]
        if not first.has_buffered:
            self.check()
        return self._checked(first, 0.0) if first.has_buffered else None

    def has_answer(self, beside: Sequence[Channel], timeout_s: float) -> bool:
        """Wait for a message or the loss of one of these ranks, or for news of the channels
        `beside`; whether it was one of these ranks."""
        return any(each in self.channels for each in wait_any([*self.channels, *beside], timeout_s))

    def check(self) -> None:
        """Raise if any rank is lost; does not wait."""
        for channel in wait_any(self.channels, 0.0):
            if channel is not self.channels[0] or not channel.has_buffered:
                self._checked(channel, 0.0)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def stop(self) -> None:
        """Tell the ranks to end, and close the links."""
        for channel in self.channels:
            try:
                channel.send(StopRank())
            except LinkError:
                continue
        self.close()

    def status(self, state: ProcessState) -> list[RankStatus]:
        devices = [described.device for described in self.described]
        devices += ["?"] * (len(self._hellos) - len(devices))
        return [
            RankStatus(self.role, hello.rank, hello.pid, hello.host, device, state)
            for hello, device in zip(self._hellos, devices, strict=True)
        ]

    def _send(self, channel: Channel, message: object) -> None:
        try:
            channel.send(message)
        except LinkError as error:
            raise RankError(str(error)) from error

    def _receive(self, channel: Channel, kind: type[M]) -> M:
        message = self._checked(channel, self.start_timeout_s)
        if not isinstance(message, kind):
            raise RankError(
                f"{channel.peer} sent {type(message).__name__} where {kind.__name__} was due; "
                "run the same release everywhere."
            )
        return message

    def _checked(self, channel: Channel, timeout_s: float) -> object:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                message: object = channel.receive(max(deadline_s - time.monotonic(), 0.0))
            except TimeoutError as error:
                raise self.hung(timeout_s, channel) from error
            except LinkError as error:
                raise RankError(str(error)) from error
            if isinstance(message, RankFailed):
                raise RankError(f"{channel.peer} failed: {message.message}")
            if not isinstance(message, Stage):
                return message
            if not channel.has_buffered:  # else that stage is over
                self._report(f"{channel.peer}: {message.words}")

    def hung(self, seconds: float, channel: Channel | None = None) -> RankError:
        """The error of a group whose first rank, or the one of this channel, does not answer."""
        which = "it hangs" if len(self.channels) == 1 else "a rank of its group hangs"
        return RankError(
            f"{(channel or self.channels[0]).peer} has not answered for {seconds:.1f} s although "
            f"its process runs; {which}."
        )
