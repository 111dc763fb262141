"""A client's results: the chunks of a stream, and the completion they add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.api_types.cluster_view import cluster_from_proto
from outrider.api_types.convert import (
    FINISH_REASON_NAMES,
    STATE_NAMES,
    engine_from_proto,
    logprobs_from_proto,
    origin_name,
)
from outrider.links.cluster_view import ClusterView
from outrider.links.gateway_messages import EngineStatus
from outrider.proto import control_pb2, generation_pb2
from outrider.text.outputs import PositionLogprobs

_UNKNOWN = "unknown"  # a value of a newer server


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Speculation counts; a round is one step of the target that committed tokens."""

    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    block_efficiency: float = 0.0  # tokens a round; 1 is plain decoding
    # By position in the round: how many draft tokens were verified, and accepted.
    verified_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Prompt and completion tokens; the cached ones are part of the prompt's."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """On the server's clock, from the arrival of the request."""

    time_to_first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to one sample."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]  # of each token: "target", or its proposer
    spans: tuple[tuple[int, str], ...]  # (characters, origin) of the text, if requested
    finish_reason: str | None  # "stop" or "length", in the last chunk of a sample


@dataclass(slots=True)
class Sample:
    """One generated text."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string, if one ended it
    speculation: SpeculationStats = SpeculationStats()


@dataclass(slots=True)
class Completion:
    """A request's texts, complete or so far."""

    request_id: str = ""
    model: str = ""
    seed: int = 0
    samples: list[Sample] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    usage: Usage = Usage()
    speculation: SpeculationStats = SpeculationStats()
    timings: Timings = Timings()
    resubmissions: int = 0  # how often the server resubmitted it to an engine
    resumptions: int = 0  # how often the client resumed it over another connection

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.samples[0].text if self.samples else ""

    @property
    def token_ids(self) -> list[int]:
        """Of the first sample."""
        return self.samples[0].token_ids if self.samples else []

    def take(self, response: generation_pb2.GenerateResponse) -> Chunk:
        """Add one message of the stream."""
        self.request_id = self.request_id or response.request_id
        if response.HasField("start"):
            self.model, self.seed = response.start.model, response.start.seed
        sample = self._sample(response.index)
        proposer = response.proposer or _UNKNOWN
        origins = [origin_name(origin, proposer) for origin in response.origins]
        sample.text += response.text
        sample.token_ids += response.token_ids
        sample.origins += origins
        sample.logprobs += logprobs_from_proto(response.logprobs)
        self.prompt_logprobs += logprobs_from_proto(response.prompt_logprobs)
        if response.HasField("end"):
            _take_end(sample, response.end)
        if response.HasField("summary"):
            self._take_summary(response.summary)
        return Chunk(
            index=response.index,
            text=response.text,
            token_ids=tuple(response.token_ids),
            origins=tuple(origins),
            spans=tuple(
                (span.num_chars, origin_name(span.origin, proposer)) for span in response.text_spans
            ),
            finish_reason=sample.finish_reason,
        )

    def _sample(self, index: int) -> Sample:
        while len(self.samples) <= index:
            self.samples.append(Sample(len(self.samples)))
        return self.samples[index]

    def _take_summary(self, summary: generation_pb2.RequestSummary) -> None:
        usage, timings = summary.usage, summary.timings
        self.usage = Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self.speculation = _stats(summary.speculation)
        self.timings = Timings(timings.time_to_first_token_s, timings.total_s)
        self.resubmissions = summary.resubmissions


def _take_end(sample: Sample, end: generation_pb2.SampleEnd) -> None:
    sample.finish_reason = FINISH_REASON_NAMES.get(end.reason, _UNKNOWN)
    kind = end.WhichOneof("stop")
    sample.stop_reason = None if kind is None else getattr(end, kind)
    sample.speculation = _stats(end.speculation)
    if end.HasField("cumulative_logprob"):
        sample.cumulative_logprob = end.cumulative_logprob


def _stats(stats: generation_pb2.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        stats.rounds,
        stats.drafted_tokens,
        stats.accepted_tokens,
        stats.block_efficiency,
        tuple(stats.verified_at),
        tuple(stats.accepted_at),
    )


@dataclass(frozen=True, slots=True)
class ServedSettings:
    """The settings that affect requests; see `EngineSettings` of the protocol."""

    target: str
    draft: str
    target_tensor_parallel: int
    draft_tensor_parallel: int
    method: str
    depth: int
    depth_reason: str
    policy: str
    verification: str
    deterministic: bool
    max_model_len: int
    vocab_size: int
    kernels: str


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One engine with its models, as a gateway knows it; see `ReplicaState` of the protocol."""

    name: str  # prefixed with its controller's name
    state: str  # "starting", "serving", "draining" or "away"
    load: int  # samples that run or wait there
    restarts: int
    draft_restarts: int
    engine: EngineStatus | None  # as the engine reports it; None while there is none

    @classmethod
    def from_proto(cls, found: control_pb2.ReplicaState) -> ReplicaStatus:
        engine = engine_from_proto(found.engine) if found.HasField("engine") else None
        return cls(
            found.name, found.state, found.load, found.restarts, found.draft_restarts, engine
        )


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server at one moment."""

    model: str
    version: str
    state: str  # "starting", "serving", "engine away" or "draining"
    uptime_s: float
    active_requests: int
    settings: ServedSettings | None  # None before an engine was ever there
    engine: EngineStatus | None  # None while there is none
    cluster: ClusterView | None  # None without a controller
    replicas: tuple[ReplicaStatus, ...] = ()

    @classmethod
    def from_proto(cls, response: control_pb2.GetStatusResponse) -> ServerStatus:
        settings = None
        if response.HasField("settings"):
            names = control_pb2.EngineSettings.DESCRIPTOR.fields_by_name
            settings = ServedSettings(**{n: getattr(response.settings, n) for n in names})
        return cls(
            model=response.model,
            version=response.version,
            state=STATE_NAMES.get(response.state, _UNKNOWN),
            uptime_s=response.uptime_s,
            active_requests=response.active_requests,
            settings=settings,
            engine=engine_from_proto(response.engine) if response.HasField("engine") else None,
            cluster=cluster_from_proto(response.cluster) if response.HasField("cluster") else None,
            replicas=tuple(ReplicaStatus.from_proto(each) for each in response.replicas),
        )
