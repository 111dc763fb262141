"""What a gateway and an engine say to each other.

The gateway owns the request: its spec and every token it has passed on. So a `Submit` is complete
in itself, and after a failure the same spec is submitted again with the tokens so far as
`output_ids`. The engine owns nothing a client must not lose.

Samples go by handles, numbers that a gateway gives each sample it submits and never gives again.
Clients' ids stay in the gateway: what the engine says about a request names none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.added_fields import added
from outrider.links.speculation import (
    SpeculationChange,
    SpeculationSettings,
    SpeculationStatus,
    StepAccount,
)
from outrider.links.tags import message
from outrider.scheduler.types import RequestSpec, RequestUpdate

# Of these messages. A gateway's `Hello` has it as its rank, which was 0 before fields were added.
# It grows with every field that is added.
REVISION = 2


@message("EngineFacts")
@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine was found to be once its models were loaded."""

    settings: dict[str, Any]  # its configuration, by path
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_model_len: int
    # Most tokens proposed a round, or exactly so many, as `speculation.policy` has it, unless a
    # request asks for another number.
    depth: int
    has_draft: bool  # a model that drafts
    kernels: str
    num_blocks: int  # KV blocks of the target
    num_draft_blocks: int = 0
    # What the checkpoint's generation_config.json sets, by the names of `SamplingParams`.
    sampling_defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> str | None:
        """The kind of head that it has beside its target, if any."""
        return self.settings["head.method"] if self.settings.get("head.model") else None


@dataclass(frozen=True, slots=True)
class SubmittedSample:
    """One of the samples submitted, to run from the prompt or from where it stopped.

    `output_ids` were told to the client before; they are computed again but not told again, and
    so are the first `prompt_logprobs_sent` log-probabilities of the prompt.
    """

    handle: int
    index: int  # among the samples of the request
    output_ids: tuple[int, ...] = ()
    prompt_logprobs_sent: int = 0


@message("Submit")
@dataclass(frozen=True, slots=True)
class Submit:
    """Gateway to engine: run samples of a request. The first computes the prompt for all."""

    spec: RequestSpec
    samples: tuple[SubmittedSample, ...]
    timeout_s: float | None  # from the moment the engine receives it
    is_resumed: bool  # an engine has been asked before: no limit on what may wait applies
    # Under which the samples go on without their gateway, for `server.resume_window_s`; "" if they
    # do not.
    resume_id: str = ""


@message("Cancel")
@dataclass(frozen=True, slots=True)
class Cancel:
    """Gateway to engine: nobody reads this sample any more. Unknown handles are no error."""

    handle: int


@message("LetGo")
@dataclass(frozen=True, slots=True)
class LetGo:
    """Gateway to engine: these samples have lost their reader, who may come back for them. Those
    that were submitted with a `resume_id` go on; the others are cancelled."""

    handles: tuple[int, ...]


@message("Attach")
@dataclass(frozen=True, slots=True)
class Attach:
    """Gateway to engine: somebody has come back for the samples of a request. `samples` are those
    unfinished in the reader's hands, each with what it has of them."""

    query: int
    resume_id: str
    samples: tuple[SubmittedSample, ...]


@message("Attached")
@dataclass(frozen=True, slots=True)
class Attached:
    """Engine to gateway: the answer. If they were held, what the reader lacks follows as updates
    for the new handles; if not, nothing was done and they must be submitted."""

    query: int
    is_held: bool


@message("Refused")
@dataclass(frozen=True, slots=True)
class Refused:
    """Engine to gateway: a sample will not run, nor those submitted with it that come after it."""

    handle: int
    message: str
    is_capacity: bool  # it may fit later or elsewhere, rather than being wrong


@message("Updates")
@dataclass(frozen=True, slots=True)
class Updates:
    """Engine to gateway: what one step meant for this gateway's samples, in order. Without any,
    only the load has changed, which is told now and then."""

    updates: tuple[RequestUpdate, ...]
    load: int = 0  # samples that run or wait in the engine, of all gateways


@message("StatusQuery")
@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Gateway to engine: how are things."""

    query: int


class ProcessState(StrEnum):
    """How a process of a server fares."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One process of a group as the engine sees it."""

    role: str
    rank: int
    pid: int
    host: str
    device: str
    state: ProcessState


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model in the engine's own process."""

    role: str
    pid: int
    host: str
    device: str


@dataclass(frozen=True, slots=True)
class ProposerCounters:
    """How often one proposer was right: of the text as it came to be, the tokens it had guessed or
    was asked for behind it, up to the first wrong one of a round; and those that were right."""

    name: str
    checked_tokens: int
    agreed_tokens: int


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What an engine has counted since its start, but for what `EngineStatus` has had for longer.

    Tuples are by a number of tokens, 0 first: how many rounds had so many.
    """

    prompt_tokens: int = 0  # looked for in the cache
    cached_tokens: int = 0  # of these: found there
    verified_tokens: int = 0
    rounds_by_drafted: tuple[int, ...] = ()
    rounds_by_verified: tuple[int, ...] = ()
    rounds_by_accepted: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0
    transfer_s: float = 0.0  # that the target waited for drafts on their way to it
    wait_s: float = 0.0  # that the engine waited for verdicts
    proposers: tuple[ProposerCounters, ...] = ()
    displaced: int = added(0)  # samples refused for those of another tenant
    fairness_preemptions: int = added(0)  # rows that went to a tenant without one
    step_tokens: int = added(0)  # of prompts computed and of texts
    # Steps by these, as `outrider.scheduler.types.STEP_TOKENS` bounds them; the last had more.
    steps_by_tokens: tuple[int, ...] = added(())


@message("EngineStatus")
@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Engine to gateway: the answer. Counters are since the engine's start."""

    query: int
    ranks: tuple[RankStatus, ...]  # none where the engine's own process holds the models
    proposal_backend: str  # "" while there is no proposal group
    proposal_sends: int  # transfers of the present proposal group
    draft_losses: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    steps: int
    committed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    models: tuple[ModelStatus, ...] = ()  # in the engine's own process
    speculation: SpeculationStatus | None = None
    counters: EngineCounters = EngineCounters()


@message("SetSpeculation")
@dataclass(frozen=True, slots=True)
class SetSpeculation:
    """Gateway to engine: change how speculation is controlled, from the next step on."""

    query: int
    change: SpeculationChange


@message("SpeculationSet")
@dataclass(frozen=True, slots=True)
class SpeculationSet:
    """Engine to gateway: the answer. With an `error` nothing was changed."""

    query: int
    change: SpeculationChange
    settings: SpeculationSettings
    error: str = ""


@message("ExplainSpeculation")
@dataclass(frozen=True, slots=True)
class ExplainSpeculation:
    """Gateway to engine: what was weighed in a step, or in the last ones."""

    query: int
    step: int | None  # None: the last ones
    last: int


@message("SpeculationExplained")
@dataclass(frozen=True, slots=True)
class SpeculationExplained:
    """Engine to gateway: the answer, the oldest step first."""

    query: int
    steps: tuple[StepAccount, ...]
    num_remembered: int  # steps of which it could be told
    calibration: tuple[float, ...]  # mean error of predictions over parts of these, oldest first
    error: str = ""
