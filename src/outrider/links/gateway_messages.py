"""Messages between a gateway and an engine.

The gateway owns the request: its spec and every token it has forwarded. So a `Submit` is complete
in itself, and after a failure the same spec is submitted again with the tokens so far as
`output_ids`. The engine owns no state that a client must not lose.

Samples are identified by handles, numbers that a gateway never reuses. Clients' request ids stay in
the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.compat_fields import added_field
from outrider.links.speculation import (
    SpeculationChange,
    SpeculationSettings,
    SpeculationStatus,
    StepAccount,
)
from outrider.links.tags import message
from outrider.scheduler.types import NONE_AHEAD, AheadCounts, RequestSpec, RequestUpdate

# The revision of these messages; a gateway sends it as the rank of its `Hello`. It was 0 before the
# first added field and grows with every one.
REVISION = 3


@message("EngineFacts")
@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's properties, known once its models are loaded."""

    settings: dict[str, Any]  # its configuration, by path
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_model_len: int
    # Maximum depth of requests that set none; with a fixed-depth policy, their depth.
    depth: int
    has_draft: bool  # a model that drafts
    kernels: str
    num_blocks: int  # KV blocks of the target
    num_draft_blocks: int = 0
    # Of the checkpoint's generation_config.json, by the names of `SamplingParams`.
    sampling_defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> str | None:
        """The kind of its head, if it has one."""
        return self.settings["head.method"] if self.settings.get("head.model") else None


@dataclass(frozen=True, slots=True)
class SubmittedSample:
    """One submitted sample, to run from the prompt or from where it stopped.

    `output_ids` were sent to the client before: they are computed again but not sent again. The
    same holds for the first `prompt_logprobs_sent` log-probabilities of the prompt.
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
    timeout_s: float | None  # from when the engine receives it
    is_resumed: bool  # submitted before: exempt from the limit on waiting requests
    # Set for resumable requests: without their gateway they run on for `server.resume_window_s`.
    resume_id: str = ""


@message("Cancel")
@dataclass(frozen=True, slots=True)
class Cancel:
    """Gateway to engine: cancel this sample. Unknown handles are ignored."""

    handle: int


@message("LetGo")
@dataclass(frozen=True, slots=True)
class Detach:
    """Gateway to engine: these samples have lost their client, which may resume. Those submitted
    with a `resume_id` run on; the others are cancelled."""

    handles: tuple[int, ...]


@message("Attach")
@dataclass(frozen=True, slots=True)
class Attach:
    """Gateway to engine: a client resumes a request. `samples` are those it has not finished
    reading, each with the tokens it has."""

    query: int
    resume_id: str
    samples: tuple[SubmittedSample, ...]


@message("Attached")
@dataclass(frozen=True, slots=True)
class AttachResult:
    """Engine to gateway: the answer to `Attach`. If the request was held, the missing updates
    follow, for the new handles; if not, nothing was done and the gateway must submit."""

    query: int
    is_held: bool


@message("Refused")
@dataclass(frozen=True, slots=True)
class SubmitRefused:
    """Engine to gateway: a sample is refused, and with it the later ones of its `Submit`."""

    handle: int
    message: str
    is_capacity: bool  # for lack of capacity: it may fit later or elsewhere


@message("Updates")
@dataclass(frozen=True, slots=True)
class Updates:
    """Engine to gateway: a step's updates of this gateway's samples, in order. Without any, a
    periodic report of the load."""

    updates: tuple[RequestUpdate, ...]
    load: int = 0  # samples running or waiting in the engine, of all gateways


@message("StatusQuery")
@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Gateway to engine: asks for an `EngineStatus`."""

    query: int


class ProcessState(StrEnum):
    """The state of a process of a server."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank as the engine sees it."""

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
    """A proposer's accuracy on committed text: the draft tokens compared, up to the first wrong one
    of each round, and those that agreed."""

    name: str
    checked_tokens: int
    agreed_tokens: int


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """An engine's counters since its start, besides those of `EngineStatus`.

    Tuples are histograms: the number of rounds by a number of tokens, from 0.
    """

    prompt_tokens: int = 0  # looked up in the prefix cache
    cached_tokens: int = 0  # of these, found there
    verified_tokens: int = 0
    rounds_by_drafted: tuple[int, ...] = ()
    rounds_by_verified: tuple[int, ...] = ()
    rounds_by_accepted: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0
    transfer_s: float = 0.0  # the target waited for draft tokens in transfer
    wait_s: float = 0.0  # the engine waited for verdicts
    proposers: tuple[ProposerCounters, ...] = ()
    displaced: int = added_field(0)  # waiting samples displaced by another tenant's
    fairness_preemptions: int = added_field(0)  # rows preempted for a tenant without one
    step_tokens: int = added_field(0)  # prompt tokens computed and output tokens
    # Histogram of steps by these, with the bounds `outrider.scheduler.types.STEP_TOKENS`.
    steps_by_tokens: tuple[int, ...] = added_field(())
    ahead: AheadCounts = added_field(NONE_AHEAD)  # of drafting ahead of outcomes


@message("EngineStatus")
@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Engine to gateway: the answer to `StatusQuery`. Counters are since the engine's start."""

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
    """Gateway to engine: change the speculation policy or bound, from the next step on."""

    query: int
    change: SpeculationChange


@message("SpeculationSet")
@dataclass(frozen=True, slots=True)
class SetSpeculationResult:
    """Engine to gateway: the answer to `SetSpeculation`. With an `error` nothing was changed."""

    query: int
    change: SpeculationChange
    settings: SpeculationSettings
    error: str = ""


@message("ExplainSpeculation")
@dataclass(frozen=True, slots=True)
class ExplainSpeculation:
    """Gateway to engine: explain a step, or the last ones."""

    query: int
    step: int | None  # None: the last ones
    last: int


@message("SpeculationExplained")
@dataclass(frozen=True, slots=True)
class ExplainSpeculationResult:
    """Engine to gateway: the answer to `ExplainSpeculation`, oldest step first."""

    query: int
    steps: tuple[StepAccount, ...]
    num_remembered: int  # recorded steps
    calibration: tuple[float, ...]  # mean prediction error over parts of these, oldest first
    error: str = ""
