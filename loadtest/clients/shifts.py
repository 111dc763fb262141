"""A shift: one arm under one load for a period of time, the unit of work of a client process.

Every client process gets the same shift and takes its share: every n-th arrival of an open loop,
an n-th of the clients of a closed one. The schedule does not depend on the number of processes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from outrider.loadtest.arrivals import Arrivals
from outrider.loadtest.arrivals import share_of as arrivals_of
from outrider.loadtest.records import ShiftPhase
from outrider.loadtest.requests import ASSISTANT, USER, BenchRequest, Message, Prompt
from outrider.loadtest.targets.base import TargetSpec


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """`arrivals` for an open loop, or the number of `clients` of a closed one."""

    name: str
    kind: str  # "rate", "clients" or "trace"
    value: float
    arrivals: Arrivals | None = None
    clients: int = 0
    think_s: float = 0.0  # from a reply to the next turn or, in a closed loop, request
    text: str = ""  # the dataset, where a run has several
    prompt_range: tuple[int, int] = (0, 0)  # its half-open range in the pool
    temperature: float | None = None  # where a run has several


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options common to all requests of a run."""

    max_tokens: int = 64
    # "fixed": exactly max_tokens; "own": up to max_tokens or EOS; "trace": exactly the dataset's
    # output length, at most max_tokens.
    length: str = "own"
    temperature: float = 0.0
    seed: int = 0
    max_turns: int = 1

    def under(self, load: LoadSpec) -> RequestOptions:
        """These options with the load's overrides."""
        if load.temperature is None:
            return self
        return dataclasses.replace(self, temperature=load.temperature)

    @property
    def ignores_eos(self) -> bool:
        return self.length != "own"


@dataclass(frozen=True, slots=True)
class Shift:
    arm: str
    target: TargetSpec
    load: LoadSpec
    block: int
    origin_s: float  # time zero of the run, on the monotonic clock
    start_s: float  # on the same clock
    warm_up_s: float
    measured_s: float
    cool_down_s: float
    timeout_s: float  # of one request, from its intended time
    drain_s: float  # time to finish after the last request was sent
    prompts: tuple[int, ...]  # indices into the pool, in sending order
    request_options: RequestOptions
    max_requests: int | None = None  # of the whole shift, which ends with the last of them
    max_in_flight: int | None = None  # of the whole shift; queueing in the client counts as latency
    max_outstanding: int = 20_000  # of one process; requests beyond it fail without being sent
    keeps_answers: bool = False

    def starting(self, start_s: float) -> Shift:
        """The same shift with another start time."""
        return dataclasses.replace(self, start_s=start_s)

    @property
    def sending_s(self) -> float:
        return self.warm_up_s + self.measured_s + self.cool_down_s

    def phase_at(self, intended_s: float) -> ShiftPhase:
        offset_s = intended_s - self.start_s
        if offset_s < self.warm_up_s:
            return ShiftPhase.WARM_UP
        if offset_s < self.warm_up_s + self.measured_s:
            return ShiftPhase.MEASURED
        return ShiftPhase.COOL_DOWN

    def arrivals(self, client: int, clients: int) -> Iterator[tuple[int, float]]:
        """This client's share of an open loop: number and due time of each arrival."""
        assert self.load.arrivals is not None
        seed = random.Random(
            f"{self.request_options.seed}/{self.load.name}/{self.block}"
        ).getrandbits(32)
        offsets = islice(self.load.arrivals.offsets(self.sending_s, seed), self.max_requests)
        mine = arrivals_of(offsets, client, clients)
        return ((number, self.start_s + offset) for number, offset in mine)

    def request_numbers(self, client: int, clients: int) -> Iterator[int]:
        """Numbers of the requests this client sends in a closed loop."""
        numbers: Iterator[int] = count(client, clients)
        if self.max_requests is not None:
            numbers = iter(range(client, self.max_requests, clients))
        return numbers

    def prompt_index(self, number: int) -> int:
        """Index of the prompt of a request; prompts repeat when used up."""
        return self.prompts[number % len(self.prompts)]


def share_of(total: int, client: int, clients: int) -> int:
    """A client's share of `total`; shares differ by at most one."""
    return total // clients + (client < total % clients)


def request_for(
    prompt: Prompt, turn: int, history: list[Message], request_options: RequestOptions
) -> BenchRequest:
    """The request of one turn; appends the turn to `history`, the messages before it."""
    max_tokens = request_options.max_tokens
    if request_options.length == "trace" and prompt.output_tokens is not None:
        max_tokens = max(1, min(prompt.output_tokens, max_tokens))
    request_id = f"{prompt.id}#{turn}"
    messages: tuple[Message, ...] = ()
    if prompt.text is None and prompt.token_ids is None:
        history.append(Message(USER, prompt.turns[turn]))
        messages = tuple(history)
    return BenchRequest(
        id=request_id,
        category=prompt.category,
        messages=messages,
        text=prompt.text,
        token_ids=prompt.token_ids,
        max_tokens=max_tokens,
        ignores_eos=request_options.ignores_eos,
        temperature=request_options.temperature,
        # Equal in every arm, so that sampled replies can be compared too.
        seed=random.Random(f"{request_options.seed}/{request_id}").getrandbits(32),
    )


def append_answer(messages: list[Message], text: str) -> None:
    """Appends the assistant's reply."""
    messages.append(Message(ASSISTANT, text))


def num_turns(prompt: Prompt, request_options: RequestOptions) -> int:
    """Number of requests of the conversation."""
    return max(1, min(len(prompt.turns), request_options.max_turns))
