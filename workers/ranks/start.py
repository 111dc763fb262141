"""One rank of a target or draft group as a process: dials in to the engine, loads, serves plans.

It is started by hand, spawned, or as a Ray actor, with only the engine's address, the secret and
its rank; the rest comes over the link.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from outrider.errors import OutriderError
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.frames import LinkClosedError, LinkError
from outrider.links.handshake import dial_in
from outrider.links.rank_messages import (
    Allocate,
    Hello,
    LoadWeights,
    RankDescription,
    RankFailed,
    RankSettings,
    Role,
    Setup,
    Stage,
    StopRank,
    WeightsLoaded,
)
from outrider.logs import setup_logging
from outrider.progress_stages import StageReporter, stage
from outrider.trace import TracedMethod, traced
from outrider.workers.device import Placement, gpu_bytes, gpu_uuid, place, take_cores
from outrider.workers.groups.collective import Collective, SingleRankGroup
from outrider.workers.groups.link_store import LinkStore
from outrider.workers.groups.process_group import (
    GROUP_TIMEOUT_S,
    shard_of,
    tensor_parallel_group,
)
from outrider.workers.heads.base import Head
from outrider.workers.heads.kv import head_bytes_per_block
from outrider.workers.heads.loader import load_head
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.kv import bytes_per_block
from outrider.workers.ranks.build import BuiltDraft, BuiltTarget, RankBuilder
from outrider.workers.ranks.draft import DraftRank
from outrider.workers.ranks.inbox import RankInbox
from outrider.workers.ranks.proposal_link import LinkOpener
from outrider.workers.ranks.target import TargetRank
from outrider.workers.weights.checkpoint import load_spec
from outrider.workers.weights.generation import load_sampling_defaults
from outrider.workers.weights.loader import load_model

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 60.0
_SPIN_S = 0.02  # longer than a step of many rows; on a CPU the ranks need every core

M = TypeVar("M")


class RankServer(Protocol):
    """Handles the engine's messages on a loaded rank."""

    def handle(self, message: object) -> None: ...

    def traced_methods(self) -> list[TracedMethod]: ...


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The identity of a rank, and the address of its engine."""

    engine: str  # "unix:/path" or "tcp:host:port"
    role: Role
    rank: int
    size: int
    own_host: str | None = None  # its address for other ranks; by default the one it dials from


def run_rank(
    where: RankPlace, secret: str, on_link: Callable[[socket.socket], None] = lambda link: None
) -> None:
    """Serve until the engine sends `StopRank` or closes the link. `on_link` gets the link's socket
    first. Errors are reported to the engine and raised."""
    hello = Hello(where.role, where.rank, where.size, os.getpid(), socket.gethostname())
    sock = dial_in(where.engine, secret, hello, DIAL_TIMEOUT_S)
    on_link(sock)
    with (
        contextlib.ExitStack() as tracing,
        Channel(sock, RANK_CODEC, peer="the engine") as channel,
        contextlib.closing(
            LinkStore(where.engine, secret, GROUP_TIMEOUT_S, where.own_host)
        ) as store,
    ):
        start = _Startup(channel, where, store, secret)
        try:
            server = start.run()
            tracing.enter_context(traced(_name(where), server.traced_methods))
            gc.freeze()  # start-up objects: a full collection takes 100 ms
            while not isinstance(message := start.inbox.receive(), StopRank):
                server.handle(message)
        except LinkClosedError:
            logger.info("the engine has closed the link")
        except Exception as error:
            _report_failure(channel, error)
            raise
        finally:
            start.release_graphs()


def _name(where: RankPlace) -> str:
    return where.role if where.rank == 0 else f"{where.role}-{where.rank}"


def _report_failure(channel: Channel, error: Exception) -> None:
    text = str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"
    try:
        channel.send(RankFailed(text))
    except LinkError as link_error:
        logger.warning("cannot report the failure to the engine: %s", link_error)


class _Startup:
    """The exchanges of start-up, in order; see `outrider.links.rank_messages`."""

    def __init__(self, channel: Channel, where: RankPlace, store: LinkStore, secret: str) -> None:
        self._channel = channel
        self._where = where
        self._store = store
        self._secret = secret
        self.inbox = RankInbox(channel)
        self.release_graphs: Callable[[], None] = lambda: None

    def run(self) -> RankServer:
        setup = self._expect(Setup)
        settings = setup.settings
        setup_logging(
            settings.log_level,
            self._where.role,
            self._where.rank,
            json_lines=settings.log_format == "json",
        )
        take_cores(settings.num_threads, setup.host_share, setup.host_index)
        with self._stages(settings):
            placement = place(
                settings.device,
                settings.dtype,
                settings.cpu_kernels,
                settings.deterministic,
                self._where.role,
            )
            self._describe(settings, placement)
            group = self._meet(setup, placement)
            builder = self._load(settings, placement, group)
            built = self._build(builder)
        self._channel.send(built.ready)
        if placement.device.type == "cuda":
            self.inbox.spin_s = _SPIN_S
        links = LinkOpener(
            self._store,
            self._secret,
            placement.device,
            settings.transfer_timeout_s,
            moves_tensors=settings.verification != "shared",
            ring_shape=built.worker.ring_shape,
        )
        common = (self._channel, self.inbox, group, links)
        if isinstance(built, BuiltDraft):
            return DraftRank(*common, built.worker)
        return TargetRank(*common, built.worker, builder.decoder.spec.vocab_size)

    def _stages(self, settings: RankSettings) -> AbstractContextManager[object]:
        """Report long stages to the engine."""

        def report(words: str) -> None:
            with contextlib.suppress(LinkError):  # the next message will fail, too
                self._channel.send(Stage(words))

        return StageReporter(report) if settings.hears_stages else contextlib.nullcontext()

    def _describe(self, settings: RankSettings, placement: Placement) -> None:
        spec = load_spec(settings.model, revision=settings.revision)
        self._channel.send(
            RankDescription(
                device=str(placement.device),
                gpu_bytes=gpu_bytes(placement.device),
                gpu_uuid=gpu_uuid(placement.device),
                vocab_size=spec.vocab_size,
                eos_ids=spec.eos_ids,
                max_position=spec.max_position,
                is_extendable=spec.rope is not None,
                sampling_defaults=self._sampling_defaults(settings),
            )
        )

    def _sampling_defaults(self, settings: RankSettings) -> dict[str, Any]:
        """The target's, sent by its first rank only."""
        if self._where.role != Role.TARGET or self._where.rank != 0:
            return {}
        return load_sampling_defaults(settings.model, revision=settings.revision)

    def _meet(self, setup: Setup, placement: Placement) -> Collective:
        rank, size = self._where.rank, self._where.size
        if size == 1:
            return SingleRankGroup()
        with stage("waiting for the other ranks of its group"):
            return tensor_parallel_group(
                self._store, setup.meeting, rank, size, placement, setup.settings.deterministic
            )

    def _load(self, settings: RankSettings, placement: Placement, group: Collective) -> RankBuilder:
        request = self._expect(LoadWeights)
        start_s = time.monotonic()
        shard = shard_of(group)
        decoder = load_model(
            settings.model,
            dtype=placement.dtype,
            device=placement.device,
            ops=placement.ops,
            shard=shard,
            max_position=request.max_position or None,
            revision=settings.revision,
            quantization=settings.quantization,
            cache_packed=True,
            keeps_stored_format=placement.keeps_stored_format,
            narrow=self._where.role == Role.DRAFT,  # with dtype auto only
        )
        head = _load_head(settings, placement, decoder)
        assert request.bounds is not None
        builder = RankBuilder(
            self._where.role, settings, placement, group, decoder, head, request.bounds
        )
        block_bytes = bytes_per_block(decoder.spec, settings.block_size, placement.dtype, shard)
        if head is not None:
            spec = head.spec
            block_bytes += head_bytes_per_block(spec, settings.block_size, placement.dtype)
        self._channel.send(
            WeightsLoaded(
                block_bytes,
                builder.kv_bytes(),
                placement.ops.name,
                time.monotonic() - start_s,
                None if head is None else head.spec.max_depth,
            )
        )
        return builder

    def _build(self, builder: RankBuilder) -> BuiltDraft | BuiltTarget:
        request = self._expect(Allocate)
        builder = builder.with_sizes(request.num_rows, request.max_model_len)
        runner = builder.runner(request.num_blocks, request.vocab_size)
        if self._where.role == Role.DRAFT:
            return builder.draft(runner, self._secret, self._hold_graphs)
        return builder.target(runner, self._secret, self._hold_graphs)

    def _hold_graphs(self, release: Callable[[], None]) -> None:
        self.release_graphs = release

    def _expect(self, kind: type[M]) -> M:
        message = self._channel.receive()
        if isinstance(message, StopRank):
            raise LinkClosedError("the engine stopped while this rank was starting.")
        if not isinstance(message, kind):
            raise LinkError(
                f"the engine sent {type(message).__name__} where {kind.__name__} was due; "
                "run the same release on both sides."
            )
        return message


def _load_head(settings: RankSettings, placement: Placement, decoder: Decoder) -> Head | None:
    """Every target rank has the whole head, so drafting needs no communication."""
    if settings.head_model is None:
        return None
    return load_head(
        settings.head_model,
        decoder.spec,
        settings.model,
        dtype=placement.dtype,
        device=placement.device,
        ops=placement.ops,
        max_position=decoder.spec.max_position,
        revision=settings.head_revision,
        target_revision=settings.revision,
        target_embedding=decoder.whole_embedding,
    )


ROLES = (Role.TARGET, Role.DRAFT)
