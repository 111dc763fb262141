"""Messages between the engine and the ranks of a group, in their order.

The engine listens and a rank connects. A group starts in four exchanges, each of which can fail
with a `RankFailed`: `Setup`/`RankDescription`, `LoadWeights`/`WeightsLoaded`, `Allocate`/`Ready`,
and for a draft `Join`/`DraftGroupJoined`. Then steps follow. The engine owns plans and sends them
ahead to both groups. Proposals and outcomes go straight between draft and target, on a proposal
link. The target owns the committed text: only its `VerifyResult` commits a token. A rank ends when
its link to the engine ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.compat_fields import added_field
from outrider.links.tags import message
from outrider.scheduler.costs import CostTable
from outrider.scheduler.types import NONE_AHEAD, Agreement, AheadCounts, RowInit, StepPlan, Verdict


class Role(StrEnum):
    """The kind of process that connects."""

    TARGET = "target"
    DRAFT = "draft"
    GATEWAY = "gateway"
    STORE = "store"  # a rank's second link, to the rendezvous store
    NODE = "node"  # a host that is about to end, to a controller


def proposal_meeting(number: int) -> str:
    """The rendezvous prefix of a proposal link: the first ranks of both groups."""
    return f"proposals/{number}"


@message("Hello")
@dataclass(frozen=True, slots=True)
class Hello:
    """The dialling process: a rank of a group of `size`, or a gateway."""

    role: Role
    rank: int
    size: int
    pid: int
    host: str


# -- starting a group -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The part of the configuration that a rank needs; names are those of the settings."""

    model: str
    revision: str | None
    device: str
    dtype: str
    quantization: str | None
    cpu_kernels: str
    deterministic: bool
    num_threads: int | None
    block_size: int
    verification: str
    ngram_min: int
    ngram_max: int
    gpu_memory_utilization: float
    has_fixed_kv: bool  # kv_cache_gb is set
    log_level: str
    log_format: str
    transfer_timeout_s: float  # for announced tensors
    head_model: str | None = None  # with a target
    head_revision: str | None = None
    has_draft: bool = False  # a target that receives proposals
    hears_stages: bool = added_field(False)  # the engine accepts `Stage`


@message("Setup")
@dataclass(frozen=True, slots=True)
class Setup:
    """Engine to rank: its configuration, and the group's prefix in the rendezvous store
    (`outrider.links.store_messages`).

    This rank is number `host_index` of the `host_share` ranks of the group on its host, which share
    the host's cores.
    """

    settings: RankSettings
    meeting: str
    host_share: int
    host_index: int


@message("Described")
@dataclass(frozen=True, slots=True)
class RankDescription:
    """Rank to engine: its device and its checkpoint, before the weights are read."""

    device: str
    gpu_bytes: int | None  # all the memory of its GPU; None on a CPU
    gpu_uuid: str | None  # names its GPU on all hosts; None on a CPU
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_position: int
    is_extendable: bool  # rotary positions may exceed `max_position`
    # Of the checkpoint's generation_config.json, by the names of `SamplingParams`.
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


@message("Stage")
@dataclass(frozen=True, slots=True)
class Stage:
    """Rank to engine, any time before `Ready`: a long stage of its start."""

    words: str


@message("StepBounds")
@dataclass(frozen=True, slots=True)
class StepBounds:
    """The largest step that any requests can cause."""

    rows: int  # max_num_seqs, settled
    tokens: int
    depth: int  # of proposers that run on a GPU
    max_len: int


@message("Load")
@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Engine to rank: read your share of the weights. `bounds` are those of the largest step."""

    max_position: int
    bounds: StepBounds | None = None


@message("Loaded")
@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """Rank to engine: the weights are in memory; the size of KV on this rank.

    `kv_bytes` is the device memory left for KV, None if only the configuration limits it.
    `head_depth` is the maximum depth of the head there, None if unbounded or without a head.
    """

    bytes_per_block: int
    kv_bytes: int | None
    kernels: str
    seconds: float
    head_depth: int | None = None


@message("Allocate")
@dataclass(frozen=True, slots=True)
class Allocate:
    """Engine to rank: the numbers of KV blocks and rows; `vocab_size` is the target's."""

    num_blocks: int
    num_rows: int  # max_num_seqs, settled
    max_model_len: int
    vocab_size: int


@message("Ready")
@dataclass(frozen=True, slots=True)
class Ready:
    """Rank to engine: ready for plans. The first rank of a group adds its measured pass times; see
    `StepCosts`. `max_depth` bounds drafting; None: unbounded. `max_branches` is behind how many
    outcomes a draft can draft ahead."""

    verify: CostTable | None = None
    first_draft: CostTable | None = None
    next_draft: CostTable | None = None
    prefill_s: float = 0.0
    context_s: float = 0.0
    tile_tokens: int = 4
    max_depth: int | None = None
    max_branches: int = added_field(0)


@message("Join")
@dataclass(frozen=True, slots=True)
class Join:
    """Engine to the first ranks of both groups: open proposal link `number`, 1 for the first.

    A restarted draft gets a link with a new number; the target's own group is unchanged.
    """

    number: int


@message("Joined")
@dataclass(frozen=True, slots=True)
class DraftGroupJoined:
    """First draft rank to engine: the proposal link is open; the backend that moves tensors."""

    backend: str


# -- steps ------------------------------------------------------------------------------------


@message("Adopt")
@dataclass(frozen=True, slots=True)
class Adopt:
    """Engine to draft ranks: all rows; replaces all earlier state."""

    epoch: int
    rows: tuple[RowInit, ...]


@message("Step")
@dataclass(frozen=True, slots=True)
class StepPlans:
    """Engine to ranks: the next plans, in order, usually before the outcome of the plan before is
    known. Target ranks get one at a time; draft ranks get plans without their part later, together
    with the next one that has a part for them.

    `link` is the number of the proposal link, 0 if there is no draft.
    """

    link: int
    plans: tuple[StepPlan, ...]


@message("Report")
@dataclass(frozen=True, slots=True)
class DraftReport:
    """First draft rank to engine, after every step in which it caught up. Not awaited."""

    step: int
    caught_up_s: float  # in parallel with the target's pass
    agreements: tuple[Agreement, ...]


@message("Judged")
@dataclass(frozen=True, slots=True)
class VerifyResult:
    """First target rank to engine: the verdict. `lost_link`: the proposal link failed before or in
    this step, and the pass ran without the draft's proposals."""

    verdict: Verdict
    lost_link: bool = False
    transfer_s: float = 0.0  # time waited for proposals beyond the time to draft them
    ahead: AheadCounts = added_field(NONE_AHEAD)  # since the verdict before


@message("Awaiting")
@dataclass(frozen=True, slots=True)
class AwaitingDraft:
    """First target rank to engine: it has waited long for the proposals of this step."""

    step: int


@message("Release")
@dataclass(frozen=True, slots=True)
class ReleaseLink:
    """Engine to the first target rank: wait for nothing more on this proposal link, its draft is
    lost."""

    link: int


# -- on a proposal link, between the first ranks of target and draft ----------------------------


@message("MemoryOffered")
@dataclass(frozen=True, slots=True)
class MemoryOffered:
    """Target to draft, its first message: the name of memory of its host for both devices; empty:
    its device shares none."""

    name: str


@message("MemoryShared")
@dataclass(frozen=True, slots=True)
class MemoryShared:
    """Draft to target: whether its device shares that memory. Else messages bring everything."""

    is_shared: bool


@message("Opened")
@dataclass(frozen=True, slots=True)
class LinkOpened:
    """Target to draft: the link may be used."""


@message("Outcomes")
@dataclass(frozen=True, slots=True)
class OutcomeMail:
    """Target to draft: the outcomes of consecutive steps, see
    `outrider.workers.ranks.packed_outcome`. When they are sent follows from the plans; see
    `outrider.workers.ranks.outcome_batches`."""

    outcomes: tuple[bytes, ...]


@message("Round")
@dataclass(frozen=True, slots=True)
class RoundMail:
    """Draft to target: the proposals of a step. Under rejection sampling their distributions
    follow, in `num_parts` `RoundPart`s or, between GPUs, over NCCL."""

    step: int
    draft_s: float
    was_idle: bool  # else the outcome before came while the draft caught up
    packed: bytes  # see `outrider.workers.ranks.packed_round`
    num_parts: int = 0
    ahead: AheadCounts = added_field(NONE_AHEAD)  # since the round before


@message("RoundPart")
@dataclass(frozen=True, slots=True)
class RoundPart:
    """Draft to target: some of the distributions that the draft tokens were sampled from."""

    data: bytes


# -- ending -----------------------------------------------------------------------------------


@message("Failed")
@dataclass(frozen=True, slots=True)
class RankFailed:
    """Rank to engine, its last message: why it failed."""

    message: str


@message("Stop")
@dataclass(frozen=True, slots=True)
class StopRank:
    """Engine to rank: end normally."""
