"""What the engine and the ranks of a group say to each other, in the order they say it.

The engine listens and a rank dials in. A group starts in four exchanges, each of which can fail
with a sentence: `Setup`/`Described`, `Load`/`Loaded`, `Allocate`/`Ready`, and for a draft `Join`/
`Joined`. Then come steps. The engine owns plans; the target owns the committed text, so only its
`Judged` makes a token true; a draft announces what it has, and nobody waits for what was not
announced. A rank whose link to the engine ends has nothing left to do and ends too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.added_fields import added
from outrider.links.tags import message
from outrider.scheduler.costs import CostTable
from outrider.scheduler.types import Agreement, RowInit, StepPlan, Verdict


class Role(StrEnum):
    """Who dials in to an engine."""

    TARGET = "target"
    DRAFT = "draft"
    GATEWAY = "gateway"
    STORE = "store"  # a rank again, for what its group agrees on
    NODE = "node"  # a host that is about to end, at a controller


def proposal_meeting(number: int) -> str:
    """The name under which the first ranks of both groups meet in a proposal group."""
    return f"proposals/{number}"


@message("Hello")
@dataclass(frozen=True, slots=True)
class Hello:
    """Who dials in: a rank of a group of `size`, or a gateway."""

    role: Role
    rank: int
    size: int
    pid: int
    host: str


# -- starting a group -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The part of the configuration a rank needs, for its role; names are those of the settings."""

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
    transfer_timeout_s: float  # for proposals that were announced
    head_model: str | None = None  # beside a target
    head_revision: str | None = None
    hears_stages: bool = added(False)  # the engine of a rank that comes up


@message("Setup")
@dataclass(frozen=True, slots=True)
class Setup:
    """Engine to rank: the configuration, and under which name the group meets on the engine's
    board (`outrider.links.store_messages`).

    This rank is number `host_index` of the `host_share` ranks of the group that share its host's
    cores.
    """

    settings: RankSettings
    meeting: str
    host_share: int
    host_index: int


@message("Described")
@dataclass(frozen=True, slots=True)
class Described:
    """Rank to engine: where it is and what the checkpoint is, before its weights are read."""

    device: str
    gpu_bytes: int | None  # all the memory of its GPU; None on a CPU
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_position: int
    is_extendable: bool  # rotary positions may go beyond `max_position`
    # What the checkpoint's generation_config.json sets, by the names of `SamplingParams`.
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


@message("Stage")
@dataclass(frozen=True, slots=True)
class Stage:
    """Rank to engine, any time before `Ready`: what takes long there."""

    words: str


@message("Load")
@dataclass(frozen=True, slots=True)
class Load:
    """Engine to rank: read your share of the weights."""

    max_position: int


@message("Loaded")
@dataclass(frozen=True, slots=True)
class Loaded:
    """Rank to engine: the weights are in memory, and this is what KV costs here.

    `kv_bytes` is the memory the device has left for KV, None where nothing limits it but the
    configuration. `head_depth` is the most that a head there can draft, None where it can draft for
    ever or there is none.
    """

    bytes_per_block: int
    kv_bytes: int | None
    kernels: str
    seconds: float
    head_depth: int | None = None


@message("Allocate")
@dataclass(frozen=True, slots=True)
class Allocate:
    """Engine to rank: so many KV blocks and rows; `vocab_size` is the target's."""

    num_blocks: int
    num_rows: int  # max_num_seqs, settled
    max_model_len: int
    vocab_size: int


@message("Ready")
@dataclass(frozen=True, slots=True)
class Ready:
    """Rank to engine: plans may come. The first rank of a group says what its passes take, as far
    as its role has them; see `StepCosts`."""

    verify: CostTable | None = None
    first_draft: CostTable | None = None
    next_draft: CostTable | None = None
    prefill_s: float = 0.0


@message("Join")
@dataclass(frozen=True, slots=True)
class Join:
    """Engine to the first ranks of both groups: meet in proposal group `number`.

    A restarted draft meets the target in a group of a new number; the target's own group is not
    touched.
    """

    number: int


@message("Joined")
@dataclass(frozen=True, slots=True)
class Joined:
    """First draft rank to engine: the proposal group stands, on this backend."""

    backend: str


# -- steps ------------------------------------------------------------------------------------


@message("Adopt")
@dataclass(frozen=True, slots=True)
class Adopt:
    """Engine to draft ranks: the rows as they are now; whatever was known before is void."""

    epoch: int
    rows: tuple[RowInit, ...]


@dataclass(frozen=True, slots=True)
class Past:
    """Something the draft has not seen: a plan it had no part in, or the verdict of any plan."""

    plan: StepPlan | None
    verdict: Verdict | None


@message("Propose")
@dataclass(frozen=True, slots=True)
class Propose:
    """Engine to draft ranks: what happened since, in order, then draft for this plan (None: only
    learn). A plan's verdict may come in a later message than the plan."""

    past: tuple[Past, ...]
    plan: StepPlan | None
    round: int | None = None  # the number this round of drafts is known by, if it is one


@message("Drafted")
@dataclass(frozen=True, slots=True)
class Drafted:
    """First draft rank to engine: the round is finished and its transfer is posted.

    `num_sends` counts the transfers of this proposal group so far.
    """

    round: int
    draft_s: float
    num_sends: int


@message("CaughtUp")
@dataclass(frozen=True, slots=True)
class CaughtUp:
    """First draft rank to engine, after every plan that had rows catch up: how long that took,
    beside the target's pass, and what it would have guessed of output among it. Nobody waits for
    it."""

    draft_s: float
    agreements: tuple[Agreement, ...]


@message("Verify")
@dataclass(frozen=True, slots=True)
class Verify:
    """Engine to target ranks: run this plan. `round` is the announced round of drafts to receive
    first, None for none."""

    plan: StepPlan
    round: int | None
    draft_s: float


@message("Judged")
@dataclass(frozen=True, slots=True)
class Judged:
    """First target rank to engine: what was committed. `lost_round`: the announced drafts did not
    arrive, and the pass ran without them."""

    verdict: Verdict
    lost_round: bool
    transfer_s: float = 0.0  # it waited for announced drafts


# -- ending -----------------------------------------------------------------------------------


@message("Failed")
@dataclass(frozen=True, slots=True)
class Failed:
    """Rank to engine, its last words."""

    message: str


@message("Stop")
@dataclass(frozen=True, slots=True)
class Stop:
    """Engine to rank: end, nothing is wrong."""
