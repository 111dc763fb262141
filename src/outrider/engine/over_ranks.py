"""Models in other processes: builds a step loop over the ranks that connect."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.config.sections import DraftConfig
from outrider.engine.launch.ranks import RankLauncher, blame_ranks
from outrider.engine.rank_group import RankError, RankGroup, Report, rank_settings
from outrider.engine.rank_workers import RemoteDraft, RemoteTarget
from outrider.engine.sizing import (
    ContextLimit,
    PoolSizes,
    default_max_depth,
    make_scheduler,
    resolve_max_model_len,
    settle_for_device,
    size_pools_of_ranks,
    size_replacement_draft,
)
from outrider.engine.step import StepLoop
from outrider.errors import CapacityError, ConfigError, OutriderError
from outrider.links.gateway_messages import EngineFacts, EngineStatus, ProcessState, RankStatus
from outrider.links.listener import Arrival, Listener
from outrider.links.rank_messages import (
    DraftGroupJoined,
    Join,
    RankDescription,
    ReleaseLink,
    Role,
    StepBounds,
    proposal_meeting,
)
from outrider.progress_stages import stage
from outrider.scheduler.costs import StepCosts
from outrider.scheduler.types import Exclusive, RequestSpec
from outrider.workers.gpu.exclusive import exclusivity
from outrider.workers.proposers.base import NO_COST

logger = logging.getLogger(__name__)

_POLL_S = 0.2


def group_sizes(config: EngineConfig) -> dict[str, int]:
    """The number of ranks by role; empty if the engine loads the models itself."""
    if config.cluster.colocate:
        return {}
    sizes: dict[str, int] = {Role.TARGET: config.target.tensor_parallel}
    if config.draft.model is not None:
        sizes[Role.DRAFT] = config.draft.tensor_parallel
    return sizes


def start_over_ranks(
    config: EngineConfig,
    listener: Listener,
    ranks: RankLauncher,
    report: Report,
    raise_if_stopped: Callable[[], None] = lambda: None,
    hold: Callable[[], None] = lambda: None,
) -> RankModels:
    """Start the ranks and wait until all are ready; from then on a lost draft is restarted. `hold`
    is called when all ranks are connected, before they load anything."""

    def raise_if_dead() -> None:
        raise_if_stopped()
        ranks.raise_if_dead()

    with blame_ranks(ranks):
        ranks.start(report)
        models = RankModels(
            config,
            listener,
            report,
            on_draft_lost=ranks.replace_draft,
            raise_if_dead=raise_if_dead,
            hold=hold,
        )
    ranks.restart_drafts()
    return models


def _costs_of(target: RankGroup, draft: RankGroup | None) -> StepCosts | None:
    """The costs that the groups measured; None if the target measured none."""
    verify = target.ready.verify
    if verify is None:
        return None
    drafting = target.ready if draft is None else draft.ready  # a head drafts in the target's ranks
    return StepCosts(
        verify,
        drafting.first_draft or NO_COST,
        drafting.next_draft or NO_COST,
        target.ready.context_s,
        target.ready.tile_tokens,
        drafting.prefill_s,
    )


def _share_gpu(groups: Sequence[RankGroup]) -> bool:
    """Whether two groups have a rank on the same GPU."""
    gpus = [{each.gpu_uuid for each in group.described} - {None} for group in groups]
    return len(set().union(*gpus)) < sum(map(len, gpus))


def _max_depth(groups: Sequence[RankGroup]) -> int | None:
    """The least bound of all groups on depth."""
    found = (group.ready.max_depth for group in groups)
    return min((each for each in found if each is not None), default=None)


def _exclusive(
    target: RankGroup, config: EngineConfig, length: int
) -> Callable[[RequestSpec], Exclusive] | None:
    """Which requests need exclusive steps; None: any requests can share a step."""
    if target.ready.max_depth is None:
        return None
    is_shared_noise = config.speculation.verification == "shared"
    return lambda request: exclusivity(request, length, is_shared_noise)


def _meeting(role: str, life: int) -> str:
    return f"{role}/{life}"


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes fixed at the first start; a restarted draft gets the same. A replacement draft has its
    own KV size, but the same maximum length."""

    pools: PoolSizes
    vocab_size: int
    length: int


class RankModels:
    """Both groups, the step loop over them, and the thread that lets a restarted draft rejoin.

    `raise_if_dead` is polled while waiting for ranks; `on_draft_lost` must cause the draft to be
    restarted. `costs` are the ranks' measured pass times; a draft that rejoins measures its own.
    """

    costs: StepCosts | None

    def __init__(
        self,
        config: EngineConfig,
        listener: Listener,
        report: Report,
        on_draft_lost: Callable[[str], None],
        raise_if_dead: Callable[[], None],
        hold: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._hold = hold
        self._raise_if_dead = raise_if_dead
        self._on_draft_lost = on_draft_lost
        self.draft = RemoteDraft(self._lose_draft, config.stall_timeout_s)
        self._listener = listener
        self._report = report
        self._lives: Counter[str] = Counter()
        self._link_number = 0
        self._proposal_backend = ""
        self._starting: RankGroup | None = None  # a draft that is rejoining
        self._draft_error = ""  # why the last draft that connected was rejected
        self._is_closed = threading.Event()
        self._groups: list[RankGroup] = []  # during the first start
        try:
            self._target, first_draft = self._first_start()
            if first_draft is not None:
                self._connect(first_draft)
        except BaseException:
            for group in self._groups:
                group.close()
            raise
        self._worker = RemoteTarget(self._target, self.draft, config.stall_timeout_s)
        self.loop = StepLoop(self._scheduler, self.draft, self._worker)
        if first_draft is not None:
            self.draft.join(first_draft, self._link_number)
            self.loop.follow_draft()
            threading.Thread(target=self._keep_draft, name="draft supervisor", daemon=True).start()

    # -- starting -----------------------------------------------------------------------------

    def _first_start(self) -> tuple[RankGroup, RankGroup | None]:
        """Starts both groups together, exchange by exchange: sizes depend on both."""
        for role in group_sizes(self.config):
            self._groups.append(self._await_group(role))
        self._hold()
        groups = self._groups
        with ThreadPoolExecutor(len(groups)) as pool:
            described = list(pool.map(self._describe, groups))
            device = described[0].device.partition(":")[0]
            gpus = [each.gpu_bytes for each in groups[0].described if each.gpu_bytes is not None]
            config = settle_for_device(self.config, device, min(gpus, default=None))
            self.config = config
            reaches = [ContextLimit(each.max_position, each.is_extendable) for each in described]
            length = resolve_max_model_len(
                config, reaches[0], reaches[1] if len(reaches) > 1 else None
            )
            # Groups on one GPU measure its memory in turn, the target last: what it finds left is
            # free of both models' weights and of its own passes. The draft's passes are small.
            share_gpu = _share_gpu(groups)
            load = map if share_gpu else pool.map
            list(load(lambda group: self._load(group, length), reversed(groups)))
            draft_ranks = groups[1].loaded if len(groups) > 1 else []
            pools = size_pools_of_ranks(
                config, groups[0].loaded, draft_ranks, length, share_gpu=share_gpu
            )
            self._sizes = _Sizes(pools, described[0].vocab_size, length)
            self._sized_for = config.draft
            # Passes are timed here: groups on one device would compete, which they do not in steps.
            share_device = share_gpu or device == "cpu"
            list((map if share_device else pool.map)(self._allocate, groups))
        self.costs = _costs_of(groups[0], groups[1] if len(groups) > 1 else None)
        self._scheduler = make_scheduler(
            config,
            pools,
            RemoteTarget.lag,
            _max_depth(groups),
            costs=self.costs,
            head_depth=groups[0].loaded[0].head_depth,
            texts_are_remote=True,
            exclusive=_exclusive(groups[0], config, pools.max_model_len),
        )
        if len(groups) > 1:
            self._scheduler.control.ahead.set_max_branches(groups[1].ready.max_branches)
        self.facts = EngineFacts(
            settings=config.without_secrets().to_settings(),
            vocab_size=described[0].vocab_size,
            eos_ids=described[0].eos_ids,
            max_model_len=pools.max_model_len,
            depth=default_max_depth(config, device),
            has_draft=len(groups) > 1,
            kernels=groups[0].loaded[0].kernels,
            num_blocks=pools.target,
            num_draft_blocks=pools.draft,
            sampling_defaults=described[0].sampling_defaults,
        )
        return groups[0], groups[1] if len(groups) > 1 else None

    def _await_group(self, role: str) -> RankGroup:
        start_s = time.monotonic()
        arrivals: list[Arrival] = []
        with stage(f"waiting for the {role}'s processes, which import PyTorch first"):
            while not arrivals:
                with contextlib.suppress(queue.Empty):
                    arrivals = self._listener.take_group(role, _POLL_S)
                self._raise_if_dead()
        waited_s = time.monotonic() - start_s
        pids = ", ".join(str(arrival.hello.pid) for arrival in arrivals)
        count = len(arrivals)
        self._report(f"{role}: {count} of {count} ranks up after {waited_s:.1f} s (pid {pids})")
        return self._group(role, arrivals)

    def _group(self, role: str, arrivals: list[Arrival]) -> RankGroup:
        """With a new rendezvous prefix, so that it cannot read its predecessor's keys."""
        lives = self._lives
        self._listener.store.forget(_meeting(role, lives[role]))
        lives[role] += 1
        limit_s = self.config.cluster.start_timeout_s
        return RankGroup(role, _meeting(role, lives[role]), arrivals, self._report, limit_s)

    def _describe(self, group: RankGroup) -> RankDescription:
        return group.describe(rank_settings(self.config, group.role))

    def _load(self, group: RankGroup, length: int) -> None:
        is_short = group.role == Role.DRAFT and group.described[0].max_position < length
        scheduler, device = self.config.scheduler, group.described[0].device.partition(":")[0]
        bounds = StepBounds(
            scheduler.num_seats,
            scheduler.num_step_tokens,
            default_max_depth(self.config, device),
            length,
        )
        group.load(length if is_short else None, bounds)

    def _allocate(self, group: RankGroup, num_blocks: int | None = None) -> None:
        pools = self._sizes.pools
        if num_blocks is None:
            num_blocks = pools.draft if group.role == Role.DRAFT else pools.target
        num_rows = self.config.scheduler.num_seats
        group.allocate(num_blocks, num_rows, pools.max_model_len, self._sizes.vocab_size)

    def _connect(self, draft: RankGroup) -> None:
        """Open a proposal link between target and draft. The draft answers once it is connected."""
        self._listener.store.forget(proposal_meeting(self._link_number))
        self._link_number += 1
        join = Join(self._link_number)
        self._target.send_to_first(join)
        draft.send_to_first(join)
        joined = draft.answer(draft.start_timeout_s)
        if not isinstance(joined, DraftGroupJoined):
            raise RankError(
                f"the draft sent {type(joined).__name__} where DraftGroupJoined was due."
            )
        self._proposal_backend = joined.backend
        self._report(f"draft joined, proposals over {joined.backend}")

    def _lose_draft(self, link: int, reason: str | None) -> None:
        """Release the target ranks that wait for its proposals, and have it restarted unless
        another has taken its place."""
        with contextlib.suppress(RankError):  # lost too, which the next step raises
            self._target.send_to_first(ReleaseLink(link))
        if reason is not None:
            self._on_draft_lost(reason)

    # -- a draft that rejoins -------------------------------------------------------------------

    def _keep_draft(self) -> None:
        while not self._is_closed.is_set():
            try:
                arrivals = self._listener.take_group(Role.DRAFT, _POLL_S)
            except queue.Empty:
                continue
            self._rejoin(arrivals)

    def _rejoin(self, arrivals: list[Arrival]) -> None:
        group = self._group(Role.DRAFT, arrivals)
        self._starting = group
        self._draft_error = ""
        draft = self.config.draft
        try:
            self._describe(group)
            if draft != self._sized_for:
                self._check_length(group)
            self._load(group, self._sizes.length)
            num_blocks = self._sizes.pools.draft
            if draft != self._sized_for:
                num_blocks = size_replacement_draft(
                    self.config, self._sizes.pools, self._target.loaded, group.loaded
                )
            self._allocate(group, num_blocks)
            self._connect(group)
        except OutriderError as error:
            logger.warning("the draft did not rejoin: %s", error)
            self._draft_error = str(error)
            group.close()
            self._on_draft_lost(str(error))  # a hung process survives the end of its link
        else:
            self.costs = _costs_of(self._target, group)
            if self.costs is not None:
                self._scheduler.control.set_costs(self.costs)
            self._scheduler.control.ahead.set_max_branches(group.ready.max_branches)
            if draft != self._sized_for:
                self._settle_another(draft, num_blocks)
            self.draft.join(group, self._link_number)
        finally:
            self._starting = None

    # -- replacing the draft --------------------------------------------------------------------

    def change_draft(self, config: EngineConfig) -> None:
        """From any thread: the next draft to join is the one of `config`. Until then decoding
        continues, with the present draft as long as it lives."""
        if not self.facts.has_draft or config.draft.model is None:
            raise ConfigError(
                "draft.model can be changed while the engine runs, but neither left out nor added; "
                "restart the engine."
            )
        self._listener.expect(Role.DRAFT, config.draft.tensor_parallel)
        self.config = dataclasses.replace(self.config, draft=config.draft)

    @property
    def draft_error(self) -> str:
        """Why the last draft that connected was rejected; empty if it joined."""
        return self._draft_error

    def _check_length(self, group: RankGroup) -> None:
        found, length = group.described[0], self._sizes.pools.max_model_len
        if not found.is_extendable and found.max_position < length:
            raise CapacityError(
                f"draft.model reaches {found.max_position} tokens only, and requests may have "
                f"{length}; take another, or lower max_model_len and restart the engine."
            )

    def _settle_another(self, draft: DraftConfig, num_blocks: int) -> None:
        """The replacement works: use its sizes for restarts, and its settings in `facts`."""
        self._sized_for = draft
        pools = dataclasses.replace(self._sizes.pools, draft=num_blocks)
        self._sizes = dataclasses.replace(self._sizes, pools=pools)
        self._scheduler.expect_draft(num_blocks)
        self.facts.settings.update(self.config.without_secrets().to_settings())

    # -- afterwards ---------------------------------------------------------------------------

    def check(self) -> None:
        """Call while idle: detects lost ranks."""
        self._target.check()
        self.draft.check()

    def close(self) -> None:
        self._is_closed.set()
        self._listener.close()
        for group in (self._target, self.draft.group, self._starting):
            if group is not None:
                group.stop()

    def name_models(self, status: EngineStatus) -> EngineStatus:
        """The status with the ranks and the state of the draft."""
        return dataclasses.replace(
            status,
            ranks=tuple(self._ranks()),
            proposal_backend=self._proposal_backend if self.draft.group is not None else "",
            proposal_sends=self.draft.num_rounds,
            draft_losses=self.draft.num_losses,
            counters=dataclasses.replace(
                status.counters, transfer_s=self._worker.transfer_s, ahead=self._worker.ahead
            ),
        )

    def _ranks(self) -> list[RankStatus]:
        ranks = self._target.status(ProcessState.READY)
        draft, starting = self.draft.group, self._starting
        if draft is not None:
            ranks += draft.status(ProcessState.READY)
        elif starting is not None:
            ranks += starting.status(ProcessState.STARTING)
        elif self.facts.has_draft:
            size = self.config.draft.tensor_parallel
            ranks += [
                RankStatus(Role.DRAFT, rank, 0, "", "", ProcessState.LOST) for rank in range(size)
            ]
        return ranks
