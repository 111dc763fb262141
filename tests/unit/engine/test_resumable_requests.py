"""Requests without a reader: what is kept of them, for how long, and what one who comes back is
told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.resumable_requests import ResumableRequests
from outrider.links.gateway_messages import SubmittedSample
from outrider.scheduler.types import FinishReason, RequestUpdate, SampleId, TokenLogprobs

OLD, NEW = 1, 2  # links
WINDOW_S = 10.0


class Kept:
    """The record, and whom it had cancelled."""

    def __init__(self, max_detached: int = 10, max_kept: int = 1000) -> None:
        self.cancelled: list[SampleId] = []
        self.held = ResumableRequests(WINDOW_S, max_detached, self.cancelled.append, max_kept)

    def add(self, resume_id: str = "a", *handles: int, link: int = OLD) -> None:
        samples = [SubmittedSample(handle, index) for index, handle in enumerate(handles or (1,))]
        self.held.add(resume_id, link, samples)

    def say(self, handle: int, *tokens: int, **options: Any) -> RequestUpdate | None:
        return self.held.take(RequestUpdate(SampleId(OLD, handle), tokens, **options))


def has(handle: int, *tokens: int, index: int = 0, prompt_logprobs: int = 0) -> SubmittedSample:
    return SubmittedSample(handle, index, tokens, prompt_logprobs)


def logprobs(*tokens: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -1.0, 1, ((token, -1.0),)) for token in tokens)


def test_what_was_not_submitted_with_a_resume_id_passes_as_it_is() -> None:
    update = RequestUpdate(SampleId(OLD, 7), (1, 2))
    assert Kept().held.take(update) is update


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6), st.integers(0, 24))
def test_whoever_comes_back_is_told_exactly_what_follows(
    rounds: list[list[int]], position: int
) -> None:
    kept = Kept()
    kept.add()
    tokens = [token for each in rounds for token in each]
    for each in rounds:
        kept.say(1, *each, logprobs=logprobs(*each), num_accepted=max(len(each) - 1, 0))
    kept.say(1, 100, finish_reason=FinishReason.LENGTH)
    tokens.append(100)
    position = min(position, len(tokens))
    found = kept.held.attach("a", NEW, (has(5, *tokens[:position]),))
    assert found.is_held
    rest = [token for update in found.updates for token in update.token_ids]
    assert tokens[:position] + rest == tokens
    assert {update.sample_id for update in found.updates} == {SampleId(NEW, 5)}
    assert found.updates[-1].finish_reason is FinishReason.LENGTH
    assert all(update.num_accepted <= len(update.token_ids) for update in found.updates)
    for update in found.updates[:-1]:
        assert [each.token_id for each in update.logprobs] == list(update.token_ids)


def test_after_that_it_is_told_what_comes_under_its_own_handle() -> None:
    kept = Kept()
    kept.add()
    kept.say(1, 10, 11)
    kept.held.detach_link(OLD, 0.0)
    assert kept.say(1, 12) is None
    found = kept.held.attach("a", NEW, (has(5, 10),))
    assert [update.token_ids for update in found.updates] == [(11,), (12,)]
    assert kept.say(1, 13) == RequestUpdate(SampleId(NEW, 5), (13,))
    kept.held.cancel(SampleId(NEW, 5))
    assert kept.cancelled == [SampleId(OLD, 1)]
    assert kept.held.num_samples == 0


def test_what_a_reader_says_who_was_left_concerns_nobody() -> None:
    """At the same gateway the scheduler still knows the sample by the first reader's handle."""
    kept = Kept()
    kept.add()
    kept.say(1, 10)
    kept.held.attach("a", OLD, (has(5),))
    kept.held.cancel(SampleId(OLD, 1))
    kept.held.detach([SampleId(OLD, 1)], 0.0)
    assert (kept.cancelled, kept.held.num_detached) == ([], 0)
    assert kept.say(1, 11) == RequestUpdate(SampleId(OLD, 5), (11,))


def test_a_reader_may_be_lost_again_and_come_back_further_on() -> None:
    kept = Kept()
    kept.add()
    kept.say(1, 10, 11)
    kept.held.attach("a", NEW, (has(5, 10),))
    kept.say(1, 12)
    kept.held.detach([SampleId(NEW, 5)], 0.0)
    found = kept.held.attach("a", OLD, (has(8, 10, 11),))
    assert [update.token_ids for update in found.updates] == [(12,)]
    # What lay before the first return is gone, so nobody can come back from there.
    assert not kept.held.attach("a", OLD, (has(9),)).is_held


@pytest.mark.parametrize("tokens", [(10, 12), (10, 11, 12), (9,)])
def test_what_was_never_generated_is_no_place_to_go_on_from(tokens: tuple[int, ...]) -> None:
    kept = Kept()
    kept.add()
    kept.say(1, 10, 11)
    kept.held.detach([SampleId(OLD, 1)], 0.0)
    assert not kept.held.attach("a", NEW, (has(5, *tokens),)).is_held
    assert kept.cancelled == [SampleId(OLD, 1)]
    assert (kept.held.num_detached, kept.held.num_samples) == (0, 0)


def test_log_probabilities_of_the_prompt_go_on_where_they_were() -> None:
    kept = Kept()
    kept.add()
    kept.say(1, prompt_logprobs=logprobs(1, 2))
    kept.say(1, 10, prompt_logprobs=logprobs(3))
    found = kept.held.attach("a", NEW, (has(5, prompt_logprobs=1),))
    told = [each.token_id for update in found.updates for each in update.prompt_logprobs]
    assert told == [2, 3]
    assert not kept.held.attach("a", NEW, (has(5, prompt_logprobs=4),)).is_held


def test_who_reads_is_left_for_who_comes_back_before_the_loss_is_noticed() -> None:
    kept = Kept()
    kept.add("a", 1, 2)
    kept.say(1, 10)
    kept.say(2, 20)
    found = kept.held.attach("a", NEW, (has(5, 10), has(6, index=1)))
    assert found.replaced == (SampleId(OLD, 1), SampleId(OLD, 2))
    assert [update.token_ids for update in found.updates] == [(20,)]
    kept.held.detach_link(OLD, 0.0)
    assert kept.held.num_detached == 0
    assert kept.say(2, 21) == RequestUpdate(SampleId(NEW, 6), (21,))


def test_samples_nobody_asks_for_are_ended_and_none_asked_for_ends_all() -> None:
    kept = Kept()
    kept.add("a", 1, 2)
    kept.say(1, 10)
    assert kept.held.attach("a", NEW, (has(5, 10),)).is_held
    assert kept.cancelled == [SampleId(OLD, 2)]
    assert kept.held.attach("a", NEW, ()).is_held
    assert kept.cancelled == [SampleId(OLD, 2), SampleId(OLD, 1)]
    assert kept.held.num_samples == 0


def test_a_finished_sample_is_kept_until_its_reader_is_done_and_then_nothing_is() -> None:
    kept = Kept()
    kept.add()
    kept.say(1, 10, finish_reason=FinishReason.STOP, stop_token_id=10)
    kept.held.detach_link(OLD, 0.0)
    [rest] = kept.held.attach("a", NEW, (has(5),)).updates
    assert (rest.token_ids, rest.stop_token_id) == ((10,), 10)
    kept.held.cancel(SampleId(NEW, 5))
    assert kept.held.num_samples == 0
    assert kept.cancelled == []


def test_nobody_is_waited_for_beyond_the_window() -> None:
    kept = Kept()
    kept.add()
    kept.say(1, 10)
    kept.held.detach_link(OLD, 5.0)
    kept.held.expire(5.0 + WINDOW_S - 0.1)
    assert kept.held.num_detached == 1
    kept.held.expire(5.0 + WINDOW_S)
    assert kept.cancelled == [SampleId(OLD, 1)]
    assert not kept.held.attach("a", NEW, (has(5),)).is_held


@pytest.mark.parametrize(("most", "ended"), [(0, [1, 2, 3]), (2, [1])])
def test_the_longest_without_a_reader_is_ended_when_there_are_too_many(
    most: int, ended: list[int]
) -> None:
    kept = Kept(max_detached=most)
    for handle in (1, 2, 3):
        kept.add(f"id {handle}", handle)
        kept.say(handle, 10)
        kept.held.detach([SampleId(OLD, handle)], 0.0)
    assert kept.cancelled == [SampleId(OLD, handle) for handle in ended]
    assert kept.held.num_detached == most


def test_of_which_nothing_was_said_nobody_can_come_back_for() -> None:
    kept = Kept()
    kept.add()
    kept.held.detach_link(OLD, 0.0)
    assert kept.cancelled == [SampleId(OLD, 1)]


def test_memory_is_taken_from_those_without_a_reader_first() -> None:
    kept = Kept(max_kept=10)
    kept.add("read", 1)
    kept.add("alone", 2)
    kept.say(2, 1, 2, 3)
    kept.held.detach([SampleId(OLD, 2)], 0.0)
    kept.say(1, *range(5))
    assert kept.cancelled == []
    kept.say(1, 9)
    assert kept.cancelled == [SampleId(OLD, 2)]
    # Then nothing is kept of the one that is read, which goes on for its reader.
    assert kept.say(1, *range(9)) is not None
    assert kept.cancelled == [SampleId(OLD, 2)]
    assert kept.say(1, 10) == RequestUpdate(SampleId(OLD, 1), (10,))
    kept.held.detach_link(OLD, 0.0)
    assert kept.cancelled == [SampleId(OLD, 2), SampleId(OLD, 1)]
    assert kept.held.num_samples == 0


def test_log_probabilities_weigh_as_much_as_they_are() -> None:
    kept = Kept(max_kept=10)
    kept.add()
    kept.say(1, 1, 2, 3, 4, 5, logprobs=logprobs(1, 2, 3, 4, 5))
    kept.held.detach_link(OLD, 0.0)
    assert kept.held.num_detached == 0


def test_a_resubmission_takes_the_place_of_what_was_held() -> None:
    kept = Kept()
    kept.add()
    kept.say(1, 10)
    kept.held.detach([SampleId(OLD, 1)], 0.0)
    kept.held.add("a", NEW, [has(5, 10)])
    assert kept.cancelled == [SampleId(OLD, 1)]
    kept.held.take(RequestUpdate(SampleId(NEW, 5), (11,)))
    found = kept.held.attach("a", OLD, (has(9, 10),))
    assert [update.token_ids for update in found.updates] == [(11,)]


def test_those_that_are_not_resumable_are_ended_when_they_are_let_go() -> None:
    kept = Kept()
    kept.held.detach([SampleId(OLD, 3)], 0.0)
    assert kept.cancelled == [SampleId(OLD, 3)]
