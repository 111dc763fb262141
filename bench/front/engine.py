"""An engine whose model is a script: the real service and link, with steps that only take time."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from outrider.config import EngineConfig
from outrider.engine.build import BuiltEngine
from outrider.engine.doorway import Doorway
from outrider.engine.service import EngineService
from outrider.links.gateway_messages import EngineFacts
from outrider.links.secret import secret_from_environment
from outrider.scheduler.control import SpeculationControl
from outrider.scheduler.outcomes import SchedulerStats
from outrider.scheduler.request import Request
from outrider.scheduler.types import FinishReason, RequestUpdate, SampleId

CONFIG = EngineConfig.from_kwargs(model="smollm2-135m-instruct", draft_model="none")
VOCAB_SIZE = 49152
_FIRST_TOKEN, _NUM_TOKENS = 1000, 20000  # ordinary words of the vocabulary


class ScriptedScheduler:
    """Every sample runs at once, and a step adds `tokens_per_step` tokens to each."""

    def __init__(self, step_s: float, tokens_per_step: int) -> None:
        self.control = SpeculationControl()
        self.stats = SchedulerStats()
        self.num_tokens = 0
        self._running: dict[SampleId, tuple[int, int]] = {}  # tokens so far, tokens in the end
        self._step_s = step_s
        self._tokens_per_step = tokens_per_step
        self._next_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return 0

    def add(
        self, request: Request, *, after: SampleId | None = None, is_resumed: bool = False
    ) -> None:
        wanted = request.spec.max_len - len(request.spec.prompt_ids)
        self._running[request.sample_id] = 0, wanted

    def cancel(self, sample_id: SampleId) -> None:
        self._running.pop(sample_id, None)

    def step(self, now_s: float) -> list[RequestUpdate]:
        pause_s = self._next_s - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)
        self._next_s = max(self._next_s, time.monotonic() - self._step_s) + self._step_s
        return [self._grown(sample_id) for sample_id in list(self._running)]

    def _grown(self, sample_id: SampleId) -> RequestUpdate:
        so_far, wanted = self._running[sample_id]
        more = min(self._tokens_per_step, wanted - so_far)
        start = so_far * 37 + sample_id.handle
        tokens = tuple(_FIRST_TOKEN + (start + at) % _NUM_TOKENS for at in range(more))
        self.num_tokens += more
        if so_far + more < wanted:
            self._running[sample_id] = so_far + more, wanted
            reason = None
        else:
            del self._running[sample_id]
            reason = FinishReason.LENGTH
        accepted = more - 1
        return RequestUpdate(sample_id, tokens, accepted, accepted, accepted, finish_reason=reason)


def facts() -> EngineFacts:
    return EngineFacts(CONFIG.to_settings(), VOCAB_SIZE, (2,), 8192, 3, False, "scripted", 1024)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    given = parser.parse_args(arguments)
    scheduler: Any = ScriptedScheduler(given.step_ms / 1000, given.tokens_per_step)
    loop: Any = SimpleNamespace(scheduler=scheduler, step=scheduler.step)
    doorway = Doorway([given.listen], secret_from_environment(), {})
    built = BuiltEngine(CONFIG, loop, facts())
    service = EngineService(built, doorway)
    print(f"listening on {doorway.addresses[0]}", flush=True)
    threading.Thread(target=service.run, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
