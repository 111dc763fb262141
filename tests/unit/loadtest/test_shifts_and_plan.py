"""What each client takes of a shift, and in which order a plan gives them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.loadtest.arrivals import Poisson
from outrider.loadtest.clients.shifts import (
    LoadSpec,
    RequestOptions,
    append_answer,
    num_turns,
    request_for,
    share_of,
)
from outrider.loadtest.plan import ArmSpec, RunPlan, Timing
from outrider.loadtest.records import ShiftPhase
from outrider.loadtest.requests import Message, Prompt
from outrider.loadtest.servers.server import ServerSpec
from outrider.loadtest.targets.base import TargetSpec

CATEGORIES = ("code", "chat", "maths")
POOL = [Prompt(f"p{n}", CATEGORIES[n % 3], turns=("a", "b", "c")) for n in range(60)]
OPEN = LoadSpec("rate 5", "rate", 5, arrivals=Poisson(5), prompt_range=(0, 60))
OTHER = LoadSpec("rate 9", "rate", 9, arrivals=Poisson(9), prompt_range=(0, 60))


def arm(name: str) -> ArmSpec:
    return ArmSpec(name, ServerSpec(f"server {name}", "http://h:1"), TargetSpec(""))


ARMS = tuple(map(arm, ("off", "two", "four")))
PLAN = RunPlan(
    arms=ARMS,
    loads=(OPEN, OTHER),
    pool=POOL,
    prompts="made",
    is_natural=True,
    remarks=(),
    request_options=RequestOptions(),
    timing=Timing(10.0, 2.0, 1.0),
    blocks=4,
)


def shift(plan: RunPlan = PLAN, at: int = 0, load: LoadSpec = OPEN, block: int = 0) -> Any:
    return plan.shift(plan.arms[at], load, block, "http://h:1", 0.0)


@pytest.mark.parametrize("clients", [1, 2, 3, 7])
@pytest.mark.parametrize("most", [None, 20])
def test_shares_are_a_partition_of_the_schedule(clients: int, most: int | None) -> None:
    whole = replace(shift(), max_requests=most)
    shares = [list(whole.arrivals(client, clients)) for client in range(clients)]
    assert sorted(sum(shares, [])) == list(whole.arrivals(0, 1))
    if most is not None:
        assert sum(map(len, shares)) == most
        turns = [list(whole.request_numbers(client, clients)) for client in range(clients)]
        assert sorted(sum(turns, [])) == list(range(most))
    assert sum(share_of(10, client, clients) for client in range(clients)) == 10


def test_the_arms_of_a_block_get_the_same_arrivals_and_prompts_and_blocks_do_not() -> None:
    first, second = shift(at=0), shift(at=1)
    assert list(first.arrivals(0, 1)) == list(second.arrivals(0, 1))
    assert first.prompts == second.prompts
    later = shift(block=1)
    assert list(first.arrivals(0, 1)) != list(later.arrivals(0, 1))
    assert first.prompts != later.prompts and set(first.prompts) == set(later.prompts)
    repeating = replace(PLAN, repeats_order=True)
    assert shift(repeating).prompts == shift(repeating, block=1).prompts


def test_phases_go_by_the_intended_time_and_places_begin_anew() -> None:
    given = shift().starting(100.0)
    phases = [given.phase_at(100.0 + at) for at in (0.0, 1.99, 2.0, 11.99, 12.0)]
    assert phases == [ShiftPhase.WARM_UP] * 2 + [ShiftPhase.MEASURED] * 2 + [ShiftPhase.COOL_DOWN]
    assert given.prompt_index(61) == given.prompts[1]


def test_seeds_and_ids_are_the_same_in_every_arm_and_differ_by_turn() -> None:
    asks = [request_for(POOL[0], turn, [], RequestOptions(seed=4)) for turn in (0, 0, 1)]
    assert asks[0] == asks[1] and asks[0].seed != asks[2].seed
    assert [each.id for each in asks] == ["p0#0", "p0#0", "p0#1"]


def test_a_turn_carries_what_was_said_and_lengths_go_as_asked() -> None:
    said = [Message("system", "be brief")]
    request_for(POOL[0], 0, said, RequestOptions())
    append_answer(said, "yes")
    assert [m.content for m in request_for(POOL[0], 1, said, RequestOptions()).messages] == [
        "be brief", "a", "yes", "b",
    ]  # fmt: skip
    assert num_turns(POOL[0], RequestOptions(max_turns=2)) == 2
    assert num_turns(Prompt("t", "c", text="once"), RequestOptions(max_turns=2)) == 1
    traced = replace(POOL[0], output_tokens=500)
    lengths = [
        request_for(traced, 0, [], RequestOptions(max_tokens=most, length="trace")).max_tokens
        for most in (64, 900)
    ]
    assert lengths == [64, 500]


def test_every_block_gives_each_load_to_all_arms_and_who_begins_changes() -> None:
    order = PLAN.order()
    assert len(order) == 4 * 2 * 3 and len({(b, c.name, a.name) for b, c, a in order}) == 24
    starts = [a.name for b, c, a in order[::3]]
    assert starts == ["off", "off", "two", "two", "four", "four", "off", "off"]
    for at in range(0, 24, 3):
        assert len({(b, c.name) for b, c, _ in order[at : at + 3]}) == 1


def test_disjoint_prompts_are_no_other_arms_and_have_each_category() -> None:
    plan = replace(PLAN, is_disjoint=True)
    own = [
        {
            place
            for load in (OPEN, OTHER)
            for block in range(4)
            for place in shift(plan, at, load, block).prompts
        }
        for at in range(3)
    ]
    assert not (own[0] & own[1] or own[0] & own[2] or own[1] & own[2])
    assert own[0] | own[1] | own[2] == set(range(60))
    for prompt_range in own:
        assert set(Counter(POOL[place].category for place in prompt_range)) == set(CATEGORIES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arms": ()}, "no arm"),
        ({"arms": (ARMS[0], ARMS[0])}, "'off' is named twice"),
        ({"loads": ()}, "no load"),
        ({"blocks": 0}, "blocks is 0"),
        ({"pool": POOL[:2], "is_disjoint": True}, "2 prompts, too few for 3 arms"),
        ({"pool": []}, "0 prompts"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_says_why(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(PLAN, **changes)
