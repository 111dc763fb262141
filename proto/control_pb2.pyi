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

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "version", "state", "uptime_s", "active_requests", "settings", "engine", "cluster")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    state: ServerState
    uptime_s: float
    active_requests: int
    settings: EngineSettings
    engine: EngineState
    cluster: ClusterState
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[_Union[ServerState, str]] = ..., uptime_s: _Optional[float] = ..., active_requests: _Optional[int] = ..., settings: _Optional[_Union[EngineSettings, _Mapping]] = ..., engine: _Optional[_Union[EngineState, _Mapping]] = ..., cluster: _Optional[_Union[ClusterState, _Mapping]] = ...) -> None: ...

class EngineSettings(_message.Message):
    __slots__ = ("target", "draft", "target_tensor_parallel", "draft_tensor_parallel", "method", "depth", "depth_reason", "verification", "deterministic", "max_model_len", "vocab_size", "kernels")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TARGET_TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_REASON_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
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
    max_model_len: int
    vocab_size: int
    kernels: str
    def __init__(self, target: _Optional[str] = ..., draft: _Optional[str] = ..., target_tensor_parallel: _Optional[int] = ..., draft_tensor_parallel: _Optional[int] = ..., method: _Optional[str] = ..., depth: _Optional[int] = ..., depth_reason: _Optional[str] = ..., verification: _Optional[str] = ..., deterministic: bool = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., kernels: _Optional[str] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("ranks", "proposal_backend", "proposal_sends", "draft_losses", "models", "running", "waiting", "kv_blocks_used", "kv_blocks", "steps", "committed_tokens", "drafted_tokens", "accepted_tokens", "preemptions")
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
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankState, _Mapping]]] = ..., proposal_backend: _Optional[str] = ..., proposal_sends: _Optional[int] = ..., draft_losses: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelState, _Mapping]]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., steps: _Optional[int] = ..., committed_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class ClusterState(_message.Message):
    __slots__ = ("controller", "state", "restarts", "draft_restarts", "processes")
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    controller: str
    state: str
    restarts: int
    draft_restarts: int
    processes: _containers.RepeatedCompositeFieldContainer[ProcessState]
    def __init__(self, controller: _Optional[str] = ..., state: _Optional[str] = ..., restarts: _Optional[int] = ..., draft_restarts: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[ProcessState, _Mapping]]] = ...) -> None: ...

class ProcessState(_message.Message):
    __slots__ = ("role", "rank", "pid", "node", "gpu_ids", "restarts", "state")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    GPU_IDS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    role: str
    rank: int
    pid: int
    node: str
    gpu_ids: _containers.RepeatedScalarFieldContainer[str]
    restarts: int
    state: str
    def __init__(self, role: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., gpu_ids: _Optional[_Iterable[str]] = ..., restarts: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

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
