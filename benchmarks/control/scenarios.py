"""The scenarios of the matrix: machines x loads x texts x drafts, cycling through cost errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from outrider.benchmarks.control.machines import COMPUTE_BOUND, COST_ERRORS, CPU, H200, Machine
from outrider.benchmarks.control.simulation import Scenario
from outrider.benchmarks.control.texts import KINDS, RECORDED, SPEC_BENCH, LengthRanges

_ROUNDS = {1: 2400, 4: 1200, 16: 800, 64: 600, 128: 600, 256: 600}
"""Rounds of plain decoding a scenario lasts, by clients."""
_SMALL, _LARGE = (1, 4, 16), (64, 128, 256)
_FIRST_LONG = LengthRanges(prompt=(300, 900))
_SPEC_BENCH = LengthRanges(prompt=(1, 256), output=(100, 192))
_AT_ONCE = LengthRanges(prompt=(1, 256), output=(192, 192))
_BELOW, _ABOVE = 0.6, 1.3  # of the rate that plain decoding can serve


def scenarios() -> list[Scenario]:
    """All scenarios, in a fixed order."""
    turns = itertools.cycle(itertools.product((1, 0), COST_ERRORS))
    found = []
    for machine, clients in _closed():
        for kind in KINDS:
            lag, cost_error = next(turns)
            tokens = _ROUNDS[clients] * clients
            found.append(Scenario(machine, kind, clients, tokens, lag=lag, cost_error=cost_error))
        next(turns)  # else each text would always meet the same cost error
    for kind, (machine, seats), load in itertools.product(
        KINDS, ((H200, 64), (CPU, 4)), (_BELOW, _ABOVE)
    ):
        lag, cost_error = next(turns)
        lengths = LengthRanges()
        rate = load * _capacity(machine, seats, lengths)
        tokens = _ROUNDS[seats] * seats
        found.append(
            Scenario(machine, kind, seats, tokens, rate=rate, lag=lag, cost_error=cost_error)
        )
    for kind in KINDS:
        lag, cost_error = next(turns)
        tokens = 200 * 64
        found.append(
            Scenario(H200, kind, 64, tokens, lag=lag, cost_error=cost_error, lengths=_FIRST_LONG)
        )
    found += _of_recorded_texts()
    return found


def _of_recorded_texts() -> Iterator[Scenario]:
    """In a closed loop, and all at once to their ends."""
    machine, turns = H200.with_draft(0.033), itertools.cycle(COST_ERRORS)
    for clients in (8, 32, *_LARGE):
        rounds = _ROUNDS.get(clients, 600)
        error, tokens = next(turns), rounds * clients
        yield Scenario(machine, RECORDED, clients, tokens, cost_error=error, lengths=_SPEC_BENCH)
    for kind, clients in itertools.product((RECORDED, SPEC_BENCH), (8, 16, 32, *_LARGE)):
        error, tokens = next(turns), 192 * clients
        yield Scenario(
            machine,
            kind,
            clients,
            tokens,
            cost_error=error,
            lengths=_AT_ONCE,
            is_burst=True,
        )


def _closed() -> Iterator[tuple[Machine, int]]:
    h200_drafts = (0.01, 0.033, 0.1, 0.2)
    for share, clients in itertools.product(h200_drafts, (*_SMALL, 64)):
        yield H200.with_draft(share), clients
    for share, clients in itertools.product((0.033, 0.1), _LARGE[1:]):
        yield H200.with_draft(share), clients
    for share, clients in itertools.product((0.03, 0.125), _SMALL):
        yield CPU.with_draft(share), clients
    for share, clients in itertools.product((0.02, 0.1), (1, 4, 64)):
        yield COMPUTE_BOUND.with_draft(share), clients


def _capacity(machine: Machine, seats: int, lengths: LengthRanges) -> float:
    """Requests per second that plain decoding serves with all seats taken."""
    prompt, output = (sum(each) / 2 for each in (lengths.prompt, lengths.output))
    costs = machine.costs
    context_s = seats * (prompt + output / 2) * costs.context_s
    step_s = costs.verify.at(seats) + context_s
    largest = costs.verify.sizes[-1]
    prompt_s = prompt * costs.verify.at(largest) / largest
    return 1.0 / (output * step_s / seats + prompt_s)
