from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_STARTING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_ENGINE_AWAY: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_ENGINE_AWAY: ServerState
SERVER_STATE_DRAINING: ServerState

class ScaleRequest(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    def __init__(self, replicas: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollOutRequest(_message.Message):
    __slots__ = ("settings_json",)
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    settings_json: str
    def __init__(self, settings_json: _Optional[str] = ...) -> None: ...

class RollOutResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("names", "checkpoint", "max_model_len", "vocab_size", "has_chat_template", "eos_token_ids", "sampling_defaults_json")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_JSON_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    checkpoint: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_defaults_json: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., checkpoint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., has_chat_template: bool = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., sampling_defaults_json: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "processes", "needs_key", "max_body_bytes", "max_requests", "max_samples", "max_logprobs", "resume_window_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_KEY_FIELD_NUMBER: _ClassVar[int]
    MAX_BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RESUME_WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    version: str
    processes: int
    needs_key: bool
    max_body_bytes: int
    max_requests: int
    max_samples: int
    max_logprobs: int
    resume_window_s: float
    def __init__(self, version: _Optional[str] = ..., processes: _Optional[int] = ..., needs_key: bool = ..., max_body_bytes: _Optional[int] = ..., max_requests: _Optional[int] = ..., max_samples: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., resume_window_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("active_requests",)
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    active_requests: int
    def __init__(self, active_requests: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("num_ended",)
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    num_ended: int
    def __init__(self, num_ended: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "version", "state", "uptime_s", "active_requests", "settings", "engine", "cluster", "replicas")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    state: ServerState
    uptime_s: float
    active_requests: int
    settings: EngineSettings
    engine: EngineState
    cluster: ClusterState
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaState]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[_Union[ServerState, str]] = ..., uptime_s: _Optional[float] = ..., active_requests: _Optional[int] = ..., settings: _Optional[_Union[EngineSettings, _Mapping]] = ..., engine: _Optional[_Union[EngineState, _Mapping]] = ..., cluster: _Optional[_Union[ClusterState, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaState, _Mapping]]] = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("name", "state", "load", "restarts", "draft_restarts", "engine")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    load: int
    restarts: int
    draft_restarts: int
    engine: EngineState
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., load: _Optional[int] = ..., restarts: _Optional[int] = ..., draft_restarts: _Optional[int] = ..., engine: _Optional[_Union[EngineState, _Mapping]] = ...) -> None: ...

class EngineSettings(_message.Message):
    __slots__ = ("target", "draft", "target_tensor_parallel", "draft_tensor_parallel", "method", "depth", "depth_reason", "verification", "deterministic", "policy", "max_model_len", "vocab_size", "kernels")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TARGET_TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_REASON_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    target: str
    draft: str
    target_tensor_parallel: int
    draft_tensor_parallel: int
    method: str
    depth: int
    depth_reason: str
    verification: str
    deterministic: bool
    policy: str
    max_model_len: int
    vocab_size: int
    kernels: str
    def __init__(self, target: _Optional[str] = ..., draft: _Optional[str] = ..., target_tensor_parallel: _Optional[int] = ..., draft_tensor_parallel: _Optional[int] = ..., method: _Optional[str] = ..., depth: _Optional[int] = ..., depth_reason: _Optional[str] = ..., verification: _Optional[str] = ..., deterministic: bool = ..., policy: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., kernels: _Optional[str] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("ranks", "proposal_backend", "proposal_sends", "draft_losses", "models", "running", "waiting", "kv_blocks_used", "kv_blocks", "steps", "committed_tokens", "drafted_tokens", "accepted_tokens", "preemptions", "speculation", "counters")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_BACKEND_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_SENDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LOSSES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankState]
    proposal_backend: str
    proposal_sends: int
    draft_losses: int
    models: _containers.RepeatedCompositeFieldContainer[ModelState]
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    steps: int
    committed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    speculation: SpeculationState
    counters: EngineCounters
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankState, _Mapping]]] = ..., proposal_backend: _Optional[str] = ..., proposal_sends: _Optional[int] = ..., draft_losses: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelState, _Mapping]]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., steps: _Optional[int] = ..., committed_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationState, _Mapping]] = ..., counters: _Optional[_Union[EngineCounters, _Mapping]] = ...) -> None: ...

class EngineCounters(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "verified_tokens", "rounds_by_drafted", "rounds_by_verified", "rounds_by_accepted", "draft_s", "verify_s", "transfer_s", "wait_s", "proposers", "displaced", "fairness_preemptions", "step_tokens", "steps_by_tokens", "ahead")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_BY_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_BY_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_BY_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    DISPLACED_FIELD_NUMBER: _ClassVar[int]
    FAIRNESS_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    verified_tokens: int
    rounds_by_drafted: _containers.RepeatedScalarFieldContainer[int]
    rounds_by_verified: _containers.RepeatedScalarFieldContainer[int]
    rounds_by_accepted: _containers.RepeatedScalarFieldContainer[int]
    draft_s: float
    verify_s: float
    transfer_s: float
    wait_s: float
    proposers: _containers.RepeatedCompositeFieldContainer[ProposerCounters]
    displaced: int
    fairness_preemptions: int
    step_tokens: int
    steps_by_tokens: _containers.RepeatedScalarFieldContainer[int]
    ahead: AheadCounts
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., verified_tokens: _Optional[int] = ..., rounds_by_drafted: _Optional[_Iterable[int]] = ..., rounds_by_verified: _Optional[_Iterable[int]] = ..., rounds_by_accepted: _Optional[_Iterable[int]] = ..., draft_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., proposers: _Optional[_Iterable[_Union[ProposerCounters, _Mapping]]] = ..., displaced: _Optional[int] = ..., fairness_preemptions: _Optional[int] = ..., step_tokens: _Optional[int] = ..., steps_by_tokens: _Optional[_Iterable[int]] = ..., ahead: _Optional[_Union[AheadCounts, _Mapping]] = ...) -> None: ...

class AheadCounts(_message.Message):
    __slots__ = ("rounds", "hits", "drafted", "used")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    hits: int
    drafted: int
    used: int
    def __init__(self, rounds: _Optional[int] = ..., hits: _Optional[int] = ..., drafted: _Optional[int] = ..., used: _Optional[int] = ...) -> None: ...

class ProposerCounters(_message.Message):
    __slots__ = ("name", "checked_tokens", "agreed_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHECKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGREED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    checked_tokens: int
    agreed_tokens: int
    def __init__(self, name: _Optional[str] = ..., checked_tokens: _Optional[int] = ..., agreed_tokens: _Optional[int] = ...) -> None: ...

class ClusterState(_message.Message):
    __slots__ = ("controller", "state", "restarts", "draft_restarts", "processes", "order")
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    controller: str
    state: str
    restarts: int
    draft_restarts: int
    processes: _containers.RepeatedCompositeFieldContainer[ProcessState]
    order: OrderState
    def __init__(self, controller: _Optional[str] = ..., state: _Optional[str] = ..., restarts: _Optional[int] = ..., draft_restarts: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[ProcessState, _Mapping]]] = ..., order: _Optional[_Union[OrderState, _Mapping]] = ...) -> None: ...

class OrderState(_message.Message):
    __slots__ = ("what", "state", "detail")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    what: str
    state: str
    detail: str
    def __init__(self, what: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ProcessState(_message.Message):
    __slots__ = ("role", "rank", "pid", "node", "gpu_ids", "restarts", "state", "replica")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    GPU_IDS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    role: str
    rank: int
    pid: int
    node: str
    gpu_ids: _containers.RepeatedScalarFieldContainer[str]
    restarts: int
    state: str
    replica: str
    def __init__(self, role: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., gpu_ids: _Optional[_Iterable[str]] = ..., restarts: _Optional[int] = ..., state: _Optional[str] = ..., replica: _Optional[str] = ...) -> None: ...

class RankState(_message.Message):
    __slots__ = ("role", "rank", "pid", "host", "device", "state")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    role: str
    rank: int
    pid: int
    host: str
    device: str
    state: str
    def __init__(self, role: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class ModelState(_message.Message):
    __slots__ = ("role", "pid", "host", "device")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    role: str
    pid: int
    host: str
    device: str
    def __init__(self, role: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class SetSpeculationRequest(_message.Message):
    __slots__ = ("policy", "max_depth", "lift_max_depth")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    LIFT_MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    policy: str
    max_depth: int
    lift_max_depth: bool
    def __init__(self, policy: _Optional[str] = ..., max_depth: _Optional[int] = ..., lift_max_depth: bool = ...) -> None: ...

class SpeculationSettings(_message.Message):
    __slots__ = ("policy", "max_depth", "first_policy", "first_max_depth", "depth", "is_weighed")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    FIRST_POLICY_FIELD_NUMBER: _ClassVar[int]
    FIRST_MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    IS_WEIGHED_FIELD_NUMBER: _ClassVar[int]
    policy: str
    max_depth: int
    first_policy: str
    first_max_depth: int
    depth: int
    is_weighed: bool
    def __init__(self, policy: _Optional[str] = ..., max_depth: _Optional[int] = ..., first_policy: _Optional[str] = ..., first_max_depth: _Optional[int] = ..., depth: _Optional[int] = ..., is_weighed: bool = ...) -> None: ...

class SpeculationState(_message.Message):
    __slots__ = ("settings", "mean_depth", "drafting_share", "acceptance", "agreement", "gain", "draft_cost", "arrivals_per_s", "calibration_error", "steps_without", "warning")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MEAN_DEPTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_SHARE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COST_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_ERROR_FIELD_NUMBER: _ClassVar[int]
    STEPS_WITHOUT_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    settings: SpeculationSettings
    mean_depth: float
    drafting_share: float
    acceptance: float
    agreement: float
    gain: float
    draft_cost: float
    arrivals_per_s: float
    calibration_error: float
    steps_without: int
    warning: str
    def __init__(self, settings: _Optional[_Union[SpeculationSettings, _Mapping]] = ..., mean_depth: _Optional[float] = ..., drafting_share: _Optional[float] = ..., acceptance: _Optional[float] = ..., agreement: _Optional[float] = ..., gain: _Optional[float] = ..., draft_cost: _Optional[float] = ..., arrivals_per_s: _Optional[float] = ..., calibration_error: _Optional[float] = ..., steps_without: _Optional[int] = ..., warning: _Optional[str] = ...) -> None: ...

class ExplainSpeculationRequest(_message.Message):
    __slots__ = ("step", "last")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    step: int
    last: int
    def __init__(self, step: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class ExplainSpeculationResponse(_message.Message):
    __slots__ = ("steps", "num_remembered", "calibration")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepAccount]
    num_remembered: int
    calibration: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepAccount, _Mapping]]] = ..., num_remembered: _Optional[int] = ..., calibration: _Optional[_Iterable[float]] = ...) -> None: ...

class StepAccount(_message.Message):
    __slots__ = ("step", "policy", "num_rows", "num_waiting", "num_prompt_tokens", "num_drafting", "num_drafts", "num_caught_up", "candidates", "chosen", "reason", "committed", "draft_s", "verify_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTING_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    policy: str
    num_rows: int
    num_waiting: int
    num_prompt_tokens: int
    num_drafting: int
    num_drafts: int
    num_caught_up: int
    candidates: _containers.RepeatedCompositeFieldContainer[SpeculationCandidate]
    chosen: SpeculationCandidate
    reason: str
    committed: int
    draft_s: float
    verify_s: float
    def __init__(self, step: _Optional[int] = ..., policy: _Optional[str] = ..., num_rows: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_drafting: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_caught_up: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[SpeculationCandidate, _Mapping]]] = ..., chosen: _Optional[_Union[SpeculationCandidate, _Mapping]] = ..., reason: _Optional[str] = ..., committed: _Optional[int] = ..., draft_s: _Optional[float] = ..., verify_s: _Optional[float] = ...) -> None: ...

class SpeculationCandidate(_message.Message):
    __slots__ = ("level", "num_drafts", "num_verified", "tokens", "draft_s", "verify_s")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    level: int
    num_drafts: int
    num_verified: int
    tokens: float
    draft_s: float
    verify_s: float
    def __init__(self, level: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_verified: _Optional[int] = ..., tokens: _Optional[float] = ..., draft_s: _Optional[float] = ..., verify_s: _Optional[float] = ...) -> None: ...
