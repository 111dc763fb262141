"""Operators' changes to the replicas, scale and rollout: checked, and run one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.launch import Launch
from outrider.config import EngineConfig, find_setting
from outrider.errors import ConfigError, OutriderError
from outrider.links.cluster_view import OperationView

MAX_REPLICAS = 256
SECTIONS = ("target", "draft", "speculation", "cache", "scheduler")
# Must not change: a resumed request relies on the same model.
_SAME_MODEL = ("target.model", "target.revision", "target.tokenizer")

logger = logging.getLogger(__name__)

UNDER_WAY, DONE, FAILED = "under way", "done", "failed"


class Operations:
    """Runs at most one operation; `last` is its state, or that of the previous one."""

    def __init__(
        self,
        config: EngineConfig,
        launch: Launch,
        say: Say,
        check: Callable[[EngineConfig], object],
    ) -> None:
        """`check` raises if the models of a configuration cannot be served; it may take long."""
        self.config = config
        self.last: OperationView | None = None
        self._launch = launch
        self._say_on = say
        self._check = check
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def say(self, event: Event) -> None:
        """Report an event; a running operation shows it as its progress."""
        if (
            self.last is not None
            and self.last.state == UNDER_WAY
            and event.kind is not EventKind.LOG
        ):
            self.last = OperationView(self.last.what, UNDER_WAY, event.text)
        self._say_on(event)

    def scale(self, num_replicas: int) -> None:
        """Begin to scale; raises if the operation is refused."""
        if not 1 <= num_replicas <= MAX_REPLICAS:
            raise ConfigError(
                f"the number of replicas is {num_replicas}; it must be from 1 to {MAX_REPLICAS}."
            )
        what = "1 replica" if num_replicas == 1 else f"{num_replicas} replicas"
        self._begin(f"scale to {what}", lambda: self._launch.scale(num_replicas))

    def roll_out(self, settings: Mapping[str, Any]) -> None:
        """Begin a rollout; raises if the operation is refused."""
        config = changed(self._launch.config or self.config, settings)
        is_draft_only = bool(settings) and all(path.startswith("draft.") for path in settings)
        shown = ", ".join(f"{path}={value}" for path, value in settings.items())
        what = f"roll out {shown}" if settings else "roll out the same settings"
        self._begin(what, lambda: self._roll_out(config, is_draft_only))

    async def close(self) -> None:
        """Cancel the running operation and refuse further ones."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _roll_out(self, config: EngineConfig, is_draft_only: bool) -> None:
        await asyncio.to_thread(self._check, config)
        await self._launch.roll_out(config, is_draft_only=is_draft_only)
        self.config = config

    def _begin(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._is_closed:
            raise ClusterError(f"the server is ending; request it ({what}) from the next one.")
        if self.last is not None and self.last.state == UNDER_WAY:
            raise ClusterError(
                f"an operation is under way ({self.last.what}); wait until it is done, see "
                "`outrider status`."
            )
        self.last = OperationView(what, UNDER_WAY, "")
        self._say_on(Event(EventKind.STAGE, f"requested: {what}"))
        self._task = asyncio.create_task(self._carry_out(what, work()))

    async def _carry_out(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except OutriderError as error:
            self.last = OperationView(what, FAILED, str(error))
            self._say_on(Event(EventKind.TROUBLE, f"failed: {what}: {error}"))
        except Exception:
            self.last = OperationView(what, FAILED, "unexpected error; see the log.")
            logger.exception("failed: %s", what)
        else:
            self.last = OperationView(what, DONE, "")
            self._say_on(Event(EventKind.REPAIR, f"done: {what}"))


def changed(config: EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration with these settings. Raises `ConfigError` if a rollout cannot change
    them."""
    for path, value in settings.items():
        find_setting(path)
        if path.partition(".")[0] not in SECTIONS:
            known = f"{', '.join(SECTIONS[:-1])} or {SECTIONS[-1]}"
            raise ConfigError(
                f"{path} cannot be rolled out; it must be a setting of {known}. Restart the "
                "server to change it."
            )
        if path in _SAME_MODEL and value != config.to_settings()[path]:
            raise ConfigError(
                f"{path} is {value!r}, another model; start another server for it, as running "
                "requests could not go on."
            )
    return EngineConfig.from_settings(config.to_settings() | _settled(settings))


def _settled(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {path: find_setting(path).rule.settled(value) for path, value in settings.items()}
