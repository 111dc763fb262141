"""One arm under one load for a stretch of time: what a client process is told to do.

Every client process is given the same shift and takes its own share of it: of an open loop every
n-th arrival, of a closed loop its part of the clients. So one schedule exists, however many
processes send it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from outrider.bench.load.arrivals import Arrivals
from outrider.bench.load.arrivals import share_of as arrivals_of
from outrider.bench.load.asks import ASSISTANT, USER, Ask, Message, Prompt
from outrider.bench.load.records import Phase
from outrider.bench.load.targets.base import TargetSpec


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: `arrivals` for an open loop, or so many `clients` in a closed one."""

    name: str
    kind: str  # "rate", "clients" or "trace"
    value: float
    arrivals: Arrivals | None = None
    clients: int = 0
    think_s: float = 0.0  # between an answer and the next turn or, in a closed loop, request
    text: str = ""  # the set of prompts it takes, where a run has several
    places: tuple[int, int] = (0, 0)  # where these are in the pool: first, and one past the last
    temperature: float | None = None  # where a run has several


@dataclass(frozen=True, slots=True)
class Asking:
    """What all requests of a run have in common."""

    max_tokens: int = 64
    # "fixed": exactly max_tokens; "own": up to them, or the text's end; "trace": the prompt's own
    # length, exactly, up to max_tokens.
    length: str = "own"
    temperature: float = 0.0
    seed: int = 0
    max_turns: int = 1

    def under(self, load: Load) -> Asking:
        """The same with what the load says otherwise."""
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
    load: Load
    block: int
    origin_s: float  # the run's zero on the machine's monotonic clock
    start_s: float  # on that clock, like every time here
    warm_up_s: float
    measured_s: float
    cool_down_s: float
    timeout_s: float  # of one request, from its intended time
    drain_s: float  # what requests get to end in after the last was sent
    prompts: tuple[int, ...]  # places in the pool, in the order they are taken
    asking: Asking
    max_requests: int | None = None  # of the whole shift; the shift then ends with the last
    max_in_flight: int | None = None  # of the whole shift; more wait in the client, and that counts
    max_outstanding: int = 20_000  # of one process; more are counted as errors, not sent
    keeps_answers: bool = False

    def starting(self, start_s: float) -> Shift:
        """The same at another time."""
        return dataclasses.replace(self, start_s=start_s)

    @property
    def sending_s(self) -> float:
        return self.warm_up_s + self.measured_s + self.cool_down_s

    def phase_at(self, intended_s: float) -> Phase:
        offset_s = intended_s - self.start_s
        if offset_s < self.warm_up_s:
            return Phase.WARM_UP
        if offset_s < self.warm_up_s + self.measured_s:
            return Phase.MEASURED
        return Phase.COOL_DOWN

    def arrivals(self, client: int, clients: int) -> Iterator[tuple[int, float]]:
        """This client's part of the open loop: the number of each arrival, and when it is due."""
        assert self.load.arrivals is not None
        seed = random.Random(f"{self.asking.seed}/{self.load.name}/{self.block}").getrandbits(32)
        offsets = islice(self.load.arrivals.offsets(self.sending_s, seed), self.max_requests)
        mine = arrivals_of(offsets, client, clients)
        return ((number, self.start_s + offset) for number, offset in mine)

    def turns_of(self, client: int, clients: int) -> Iterator[int]:
        """The numbers of the requests this client sends in a closed loop."""
        numbers: Iterator[int] = count(client, clients)
        if self.max_requests is not None:
            numbers = iter(range(client, self.max_requests, clients))
        return numbers

    def place_of(self, number: int) -> int:
        """Which prompt the request of this number takes; the pool begins anew when used up."""
        return self.prompts[number % len(self.prompts)]


def share_of(total: int, client: int, clients: int) -> int:
    """Part of `total` things that a client takes; the parts differ by one at most."""
    return total // clients + (client < total % clients)


def ask_of(prompt: Prompt, turn: int, said: list[Message], asking: Asking) -> Ask:
    """The request of one turn; `said` is everything before it, and gets the turn appended."""
    max_tokens = asking.max_tokens
    if asking.length == "trace" and prompt.output_tokens is not None:
        max_tokens = max(1, min(prompt.output_tokens, max_tokens))
    ask_id = f"{prompt.id}#{turn}"
    messages: tuple[Message, ...] = ()
    if prompt.text is None and prompt.token_ids is None:
        said.append(Message(USER, prompt.turns[turn]))
        messages = tuple(said)
    return Ask(
        id=ask_id,
        category=prompt.category,
        messages=messages,
        text=prompt.text,
        token_ids=prompt.token_ids,
        max_tokens=max_tokens,
        ignores_eos=asking.ignores_eos,
        temperature=asking.temperature,
        # The same in every arm, so that sampled answers can be compared too.
        seed=random.Random(f"{asking.seed}/{ask_id}").getrandbits(32),
    )


def answered(said: list[Message], text: str) -> None:
    """The assistant has spoken."""
    said.append(Message(ASSISTANT, text))


def num_turns(prompt: Prompt, asking: Asking) -> int:
    """How many requests the conversation has."""
    return max(1, min(len(prompt.turns), asking.max_turns))
