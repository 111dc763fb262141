"""What an engine has counted: rounds by their sizes, and how often each proposer was right."""

from __future__ import annotations

from scheduler_tools import Simulation, make_request

from outrider.catalog.proposers import DRAFT
from outrider.engine.build import counters_of
from outrider.links.gateway_messages import ProposerCounters
from outrider.scheduler.types import STEP_TOKENS, Agreement


def test_rounds_are_counted_by_what_was_drafted_verified_and_accepted() -> None:
    simulation = Simulation(acceptance=[2])
    record = simulation.add(make_request("a", [1, 2, 3], 13, proposer=DRAFT, depth=3))
    simulation.drain()
    stats, counters = simulation.scheduler.stats, counters_of(simulation.loop)
    # The prompt's own token, then rounds of two accepted drafts and one of the target's; the last
    # has room for no more.
    assert counters.rounds_by_drafted == (1, 0, 1, 3) == counters.rounds_by_verified
    assert counters.rounds_by_accepted == (1, 0, 4)
    assert (stats.drafted_tokens, record.num_drafted, counters.verified_tokens) == (11, 11, 11)
    assert sum(i * n for i, n in enumerate(counters.rounds_by_accepted)) == stats.accepted_tokens
    assert counters.proposers == (ProposerCounters(DRAFT, checked_tokens=11, agreed_tokens=8),)


def test_steps_are_counted_by_the_tokens_read_and_written_in_them() -> None:
    simulation = Simulation(block_size=4)
    for name in ("first", "second"):
        simulation.add(make_request(name, list(range(17)), 4))
        simulation.drain()
    counters = counters_of(simulation.loop)
    # 17 tokens of the first prompt and 1 of the second, whose others were cached, each with a
    # token of its text; then one a step.
    assert counters.step_tokens == 18 + 3 + 2 + 3
    assert counters.steps_by_tokens == (6, 1, 0, 1, *([0] * (len(STEP_TOKENS) - 3)))
    assert sum(counters.steps_by_tokens) == simulation.scheduler.stats.steps


def test_plain_decoding_has_rounds_without_drafts_and_no_proposer() -> None:
    simulation = Simulation()
    simulation.add(make_request("a", [1, 2, 3], 5))
    simulation.drain()
    counters = counters_of(simulation.loop)
    assert (counters.rounds_by_drafted, counters.rounds_by_accepted) == ((5,), (5,))
    assert counters.proposers == ()


def test_what_a_draft_would_have_guessed_counts_for_its_agreement() -> None:
    simulation = Simulation(choose_depths="off")
    request = make_request("a", [1, 2, 3], 8, proposer=DRAFT, depth=3)
    simulation.add(request)
    simulation.step()
    observe = simulation.workers.verify

    def verify(plan, ticket):  # type: ignore[no-untyped-def]
        verdict = observe(plan, ticket)
        hits = (True, False, True, True)
        agreements = (Agreement(request.row, request.generation, hits),)
        return type(verdict)(verdict.epoch, verdict.step, verdict.rows, 0.0, 0.0, agreements)

    simulation.workers.verify = verify  # type: ignore[method-assign]
    simulation.step()
    assert counters_of(simulation.loop).proposers == (ProposerCounters(DRAFT, 4, 3),)


def test_a_cached_prefix_is_counted_among_the_tokens_looked_for() -> None:
    simulation = Simulation(block_size=4)
    for name in ("first", "second"):
        simulation.add(make_request(name, list(range(17)), 4))
        simulation.drain()
    counters = counters_of(simulation.loop)
    assert (counters.prompt_tokens, counters.cached_tokens) == (34, 16)


def test_updates_tell_how_long_the_request_waited_for_a_row() -> None:
    simulation = Simulation(max_num_seqs=1)
    told: dict[object, float] = {}
    take = simulation._take
    simulation._take = lambda update: (  # type: ignore[method-assign]
        told.setdefault(update.sample_id, update.queued_s),
        take(update),
    )[1]
    first = simulation.add(make_request("a", [1, 2], 3))
    second = simulation.add(make_request("b", [1, 2], 3))
    simulation.drain()
    assert told[first.request.sample_id] == 1.0, "it came at 0 and the first step was at 1"
    assert told[second.request.sample_id] == 4.0, "the first one took three steps"
