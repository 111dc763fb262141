"""`EngineConfig`, the result of configuration files, the environment, flags and `LLM(...)`.

Every field has its rule and its documentation; validation, `--help` and the example file are
generated from them. A config is frozen and complete; derived values (devices found, KV blocks that
fit) live in other types. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from outrider.catalog.heads import HeadKind
from outrider.config.bundled import AUTO, draft_beside
from outrider.config.kwargs import settings_from_kwargs
from outrider.config.rules import (
    FLAG,
    POSITIVE,
    FieldError,
    Rule,
    Setting,
    Validated,
    choice,
    did_you_mean,
    setting,
    whole,
)
from outrider.config.sections import (
    CacheConfig,
    ClusterConfig,
    DraftConfig,
    HeadConfig,
    SchedulerConfig,
    SpeculationConfig,
    TargetConfig,
)
from outrider.config.serving import ServerConfig
from outrider.errors import ConfigError

MAX_WAITING_OF_SERVERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Validated):
    """The configuration of one engine."""

    target: TargetConfig = TargetConfig()
    draft: DraftConfig = DraftConfig()
    head: HeadConfig = HeadConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    workers: str = setting(
        "auto",
        choice("auto", "inline", "processes"),
        "Where LLM runs the models: inline in its own process, or every rank in one; auto is "
        "inline unless a tensor_parallel is above 1.",
    )
    stall_timeout_s: float = setting(
        30.0,
        POSITIVE,
        "Seconds that a rank in another process may take for a step before it counts as hung; slow "
        "and first steps get more.",
    )
    deterministic: bool = setting(
        False, FLAG, "Make a request's text independent of the rest of the batch, bit for bit."
    )
    seed: int | None = setting(
        None,
        Rule(int, "a 64-bit whole number, or unset", lambda v: -(2**63) <= v < 2**64, True),
        "Seed of requests without one; unset draws one per request.",
    )
    cpu_kernels: str = setting(
        "auto",
        choice("auto", "c", "torch"),
        "CPU kernels: c compiles ours, torch uses none; auto is c where a compiler is found.",
    )
    num_threads: int | None = setting(
        None, whole(1, optional=True), "CPU threads of one process; unset is one per core."
    )
    log_level: str = setting(
        "info", choice("debug", "info", "warning", "error"), "Least severe message logged."
    )
    log_format: str = setting(
        "text", choice("text", "json"), "Log lines for people, or as JSON objects."
    )

    if not TYPE_CHECKING:  # type checkers know the fields without it

        def __new__(cls, **fields):
            for name in fields:
                if name not in cls.__dataclass_fields__:
                    raise ConfigError(
                        f"{name} is no field of EngineConfig, which has sections; "
                        f"EngineConfig.from_kwargs({name}=...) takes the names of LLM."
                    )
            return object.__new__(cls)

    def _check_together(self) -> None:
        for name, kind in SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                value = getattr(self, name)
                raise FieldError((name,), f"is {value!r}; it must be a {kind.__name__}.")
        if self.draft.model == AUTO:  # the only place that resolves it
            model = draft_beside(self.target.model, self.speculation.method, self.head.model)
            object.__setattr__(self, "draft", dataclasses.replace(self.draft, model=model))
            if model is None and self.speculation.method is None and self.head.model is None:
                speculation = dataclasses.replace(self.speculation, method=AUTO)
                object.__setattr__(self, "speculation", speculation)
        for name in ("target", "draft"):
            size = getattr(self, name).tensor_parallel
            if self.workers == "inline" and size > 1:
                raise FieldError(
                    (f"{name}.tensor_parallel", "workers"),
                    f"is {size} but workers is 'inline', and one process runs 1; set workers to "
                    "'processes' or leave it out.",
                )
        if self.speculation.method == "draft" and self.draft.model is None:
            raise FieldError(
                ("speculation.method",),
                "is 'draft' but there is no draft; set draft.model (draft_model in LLM) "
                "or choose 'ngram'.",
            )
        self._check_head()
        if self.cluster.colocate:
            self._check_colocation()

    def _check_head(self) -> None:
        head, method = self.head, self.speculation.method
        if head.model is not None and self.draft.model is not None:
            raise FieldError(
                ("head.model", "draft.model"),
                f"is {head.model!r} and draft.model is {self.draft.model!r}, but one of them "
                "proposes; leave one out.",
            )
        if method in [*HeadKind] and head.model is None and self.draft.model is None:
            raise FieldError(
                ("speculation.method",), f"is {method!r} but there is no head; set head.model."
            )
        is_known = head.model is not None and head.method != AUTO
        if is_known and method in [*HeadKind] and method != head.method:
            raise FieldError(
                ("speculation.method", "head.method"),
                f"is {method!r} but the head is of the kind {head.method!r}; leave it out.",
            )

    def _check_colocation(self) -> None:
        """One process holds one rank of each model, on one device."""
        allowed_values: dict[str, tuple[Any, ...]] = {
            "target.tensor_parallel": (1,),
            "draft.tensor_parallel": (1,),
            "workers": ("auto", "inline"),
        }
        if self.target.device != "auto":  # else the engine picks the device
            allowed_values["draft.device"] = ("auto", self.target.device)
        values = self.to_settings()
        for path, allowed in allowed_values.items():
            if values[path] not in allowed:
                raise FieldError(
                    (path, "cluster.colocate"),
                    f"is {values[path]!r} but cluster.colocate is true, which takes "
                    f"{allowed[-1]!r}; set it to that, or cluster.colocate to false.",
                )

    @property
    def method(self) -> str | None:
        """The proposer with defaults resolved, or None. Without draft or head, it depends on the
        device (`engine.sizing.settle_for_device`)."""
        if self.speculation.method not in (None, AUTO):
            return self.speculation.method
        if self.draft.model is not None:
            return "draft"
        return None if self.head.model is None else self.head.method

    @property
    def head_kind(self) -> str | None:
        """The head's kind with defaults resolved."""
        return None if self.head.model is None else self.head.method

    @property
    def has_processes(self) -> bool:
        """Whether the models run in other processes, with defaults resolved."""
        several = max(self.target.tensor_parallel, self.draft.tensor_parallel) > 1
        return self.workers == "processes" or several

    def for_server(self) -> EngineConfig:
        """The configuration with a server's defaults: a bound on waiting requests."""
        waiting = self.scheduler.max_waiting or MAX_WAITING_OF_SERVERS
        scheduler = dataclasses.replace(self.scheduler, max_waiting=waiting)
        return dataclasses.replace(self, scheduler=scheduler)

    @classmethod
    def from_settings(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from values by path ("target.model"); the others keep their defaults."""
        given: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for path, value in values.items():
            find_setting(path)
            section, _, name = path.rpartition(".")
            (parts[section] if section else given)[name] = value
        given |= {name: kind(**parts[name]) for name, kind in SECTIONS.items()}
        return cls(**given)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build from the flat names of `LLM(...)`, including vLLM's; None keeps the default."""
        values, names = settings_from_kwargs(kwargs)
        try:
            return cls.from_settings(values)
        except FieldError as error:
            name = names.get(error.paths[0])
            raise FieldError(error.paths, error.problem, name) from None

    def to_settings(self) -> dict[str, Any]:
        """Every value by path, in the order of declaration."""
        values: dict[str, Any] = {}
        for path in settings():
            section, _, name = path.rpartition(".")
            values[path] = getattr(getattr(self, section) if section else self, name)
        return values

    def without_secrets(self) -> EngineConfig:
        """For processes and files that do not need them."""
        values = self.to_settings()
        return self.from_settings(
            {p: None if settings()[p].rule.is_secret else v for p, v in values.items()}
        )


SECTIONS: Mapping[str, type[Validated]] = {
    "target": TargetConfig,
    "draft": DraftConfig,
    "head": HeadConfig,
    "speculation": SpeculationConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "server": ServerConfig,
    "cluster": ClusterConfig,
}


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting by path, sections first, in the order of declaration."""
    found: dict[str, Setting] = {}
    for section, kind in [*SECTIONS.items(), ("", EngineConfig)]:
        for item in dataclasses.fields(kind):  # type: ignore[arg-type]
            if "rule" in item.metadata:
                path = f"{section}.{item.name}" if section else item.name
                rule, doc = item.metadata["rule"], item.metadata["doc"]
                found[path] = Setting(path, item.default, rule, doc)
    return found


def find_setting(path: str) -> Setting:
    """The setting of that path; raises with the closest known name."""
    known = settings()
    if path not in known:
        leaf = path.rpartition(".")[2]
        elsewhere = [name for name in known if name.rpartition(".")[2] == leaf]
        hint = did_you_mean(elsewhere[0] if elsewhere else path, [*known, *SECTIONS])
        raise FieldError((path,), f"is no setting.{hint}")
    return known[path]
