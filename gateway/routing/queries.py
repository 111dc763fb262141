"""Queries over a link, matched with their answers by number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from outrider.api_types.errors import UnavailableError


class Queries:
    """The queries to one peer that wait for an answer. Numbers begin at 1."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    async def ask(
        self, send: Callable[[Any], None], message: Callable[[int], object], timeout_s: float
    ) -> Any:
        """Send the message for a new number; returns the answer with that number."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            send(message(number))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise UnavailableError(
                f"{self._peer} has not answered for {timeout_s:g} s; try again later."
            ) from None
        finally:
            self._answers.pop(number, None)

    def settle(self, found: Any) -> None:
        """An answer has come; one whose caller has given up is dropped."""
        answer = self._answers.pop(found.query, None)
        if answer is not None and not answer.done():
            answer.set_result(found)

    def fail(self, reason: str) -> None:
        """The peer is lost, and with it all answers."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(UnavailableError(reason))
