"""Messages between the engine and the ranks of a group, in their order.

The engine listens and a rank connects. A group starts in four exchanges, each of which can fail
with a `RankFailed`: `Setup`/`RankDescription`, `LoadWeights`/`WeightsLoaded`, `Allocate`/`Ready`,
and for a draft `Join`/`DraftGroupJoined`. Then steps follow. The engine owns plans. The target owns
the committed text: only its `VerifyResult` commits a token. The draft announces its rounds, and the
target waits for announced ones only. A rank ends when its link to the engine ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.compat_fields import added_field
from outrider.links.tags import message
from outrider.scheduler.costs import CostTable
from outrider.scheduler.types import Agreement, RowInit, StepPlan, Verdict


class Role(StrEnum):
    """The kind of process that connects."""

    TARGET = "target"
    DRAFT = "draft"
    GATEWAY = "gateway"
    STORE = "store"  # a rank's second link, to the rendezvous store
    NODE = "node"  # a host that is about to end, to a controller


def proposal_meeting(number: int) -> str:
    """The rendezvous prefix of a proposal group: the first ranks of both groups."""
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
    transfer_timeout_s: float  # for announced draft tokens
    head_model: str | None = None  # with a target
    head_revision: str | None = None
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


@message("Load")
@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Engine to rank: read your share of the weights."""

    max_position: int


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
    `StepCosts`."""

    verify: CostTable | None = None
    first_draft: CostTable | None = None
    next_draft: CostTable | None = None
    prefill_s: float = 0.0


@message("Join")
@dataclass(frozen=True, slots=True)
class Join:
    """Engine to the first ranks of both groups: form proposal group `number`.

    With a restarted draft, target and draft form a group with a new number; the target's own group
    is unchanged.
    """

    number: int


@message("Joined")
@dataclass(frozen=True, slots=True)
class DraftGroupJoined:
    """First draft rank to engine: the proposal group is connected, with this backend."""

    backend: str


# -- steps ------------------------------------------------------------------------------------


@message("Adopt")
@dataclass(frozen=True, slots=True)
class Adopt:
    """Engine to draft ranks: all rows; replaces all earlier state."""

    epoch: int
    rows: tuple[RowInit, ...]


@dataclass(frozen=True, slots=True)
class PastStep:
    """A step the draft has not seen: a plan without its part, or the verdict of any plan."""

    plan: StepPlan | None
    verdict: Verdict | None


@message("Propose")
@dataclass(frozen=True, slots=True)
class Propose:
    """Engine to draft ranks: the steps since the last message, in order, then the plan to draft for
    (None: none). A plan's verdict may come in a later message than the plan."""

    past: tuple[PastStep, ...]
    plan: StepPlan | None
    round: int | None = None  # the number of the round, if the plan is one


@message("Drafted")
@dataclass(frozen=True, slots=True)
class DraftResult:
    """First draft rank to engine: the round is drafted and its transfer is posted.

    `num_sends` counts the transfers of this proposal group so far.
    """

    round: int
    draft_s: float
    num_sends: int


@message("CaughtUp")
@dataclass(frozen=True, slots=True)
class CatchUpReport:
    """First draft rank to engine, after every plan with rows that catch up: the time it took during
    the target's pass, and its agreement with the output among the tokens. Not awaited."""

    draft_s: float
    agreements: tuple[Agreement, ...]


@message("Verify")
@dataclass(frozen=True, slots=True)
class Verify:
    """Engine to target ranks: run this plan. `round` is the announced round of draft tokens to
    receive first, None for none."""

    plan: StepPlan
    round: int | None
    draft_s: float


@message("Judged")
@dataclass(frozen=True, slots=True)
class VerifyResult:
    """First target rank to engine: the verdict. `lost_round`: the announced draft tokens did not
    arrive, and the pass ran without them."""

    verdict: Verdict
    lost_round: bool
    transfer_s: float = 0.0  # time waited for announced draft tokens


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
