"""Generates one token: a loaded engine does not necessarily answer requests."""

from __future__ import annotations

import asyncio

from outrider.cluster.errors import ClusterError
from outrider.gateway.routing.engine_link import EngineAddress, EngineLink, Event
from outrider.links.gateway_messages import EngineFacts, Submit, SubmitRefused, SubmittedSample
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import FinishReason, RequestSpec, RequestUpdate

_PROMPT = (0,)  # in every vocabulary
_SPEC = RequestSpec(
    _PROMPT,
    SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
    seed=0,
    max_len=len(_PROMPT) + 1,
)


async def probe(address: str, secret: str, timeout_s: float) -> None:
    """Raises `ClusterError` unless the engine at `address` generates a token within that time."""
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def locate() -> EngineAddress:
        return EngineAddress(address, secret)

    def take(event: Event) -> None:
        if answer.done():
            return
        if isinstance(event, RequestUpdate):
            if event.finish_reason is FinishReason.LENGTH or event.token_ids:
                answer.set_result(None)
            elif event.finish_reason is not None:
                reason = "it computed no token" if event.finish_reason is FinishReason.ERROR else ""
                answer.set_exception(_failure(reason or f"it ended as {event.finish_reason}"))
        elif isinstance(event, SubmitRefused):
            answer.set_exception(_failure(event.message))
        else:
            answer.set_exception(_failure("the engine was lost"))

    link = EngineLink(locate, _accept, _take_note)
    link.is_draining = True  # its end is no news
    running = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(timeout_s):
            await link.wait_connected(timeout_s)
            sample = SubmittedSample(link.new_handle(), 0)
            link.submit(Submit(_SPEC, (sample,), timeout_s, is_resumed=True), take)
            await answer
    except TimeoutError:
        raise _failure(f"no token within {timeout_s:g} s") from None
    finally:
        running.cancel()
        await asyncio.wait({running})


def _failure(reason: str) -> ClusterError:
    return ClusterError(f"the engine does not answer a request for one token: {reason}.")


async def _accept(facts: EngineFacts) -> None:
    """Any engine."""


async def _take_note() -> None:
    """The link is used once."""
