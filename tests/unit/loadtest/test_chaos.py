"""Chaos files, what they hit, and the verdict afterwards."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.api_types.results import ServerStatus
from outrider.errors import ConfigError
from outrider.loadtest.records import RequestOutcome, RequestRecord, ShiftPhase
from outrider.loadtest.results.chaos_verdict import AnswerMatch, chaos_verdict, compare_answer
from outrider.loadtest.servers.chaos import Chaos, ChaosEvent, processes_of, read_events
from outrider.loadtest.servers.chaos_file import ChaosTarget, PlannedEvent, read_chaos
from outrider.loadtest.servers.server import ServerSpec, ServerUnderTest
from outrider.proto import control_pb2

GOOD = """
- at: 1.5min
  do: stop
  for: 500ms
  what: {role: target, rank: 1}
- at: 20s
  do: kill
  what: draft
- {at: 30, do: term, what: gateway}
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "chaos.yaml"
    path.write_text(text)
    return path


def test_a_chaos_file_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    assert read_chaos(_file(tmp_path, GOOD)) == [
        PlannedEvent(20.0, "kill", ChaosTarget("draft")),
        PlannedEvent(30.0, "term", ChaosTarget("gateway")),
        PlannedEvent(90.0, "stop", ChaosTarget("target", 1), 0.5),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("at: 3", ":1: it must be a list of events"),
        ("[]", ":1: it must be a list of events"),
        ("- at: [", ":1: this is not valid YAML"),
        ("- kill draft", ":1: an event is 'kill draft'"),
        ("- {at: 3, do: kill}", "the event has no 'what'; add it"),
        ("- {at: 3, do: kill, what: draft, who: me}", "'who' is not a field of an event"),
        ("- {at: soon, do: kill, what: draft}", "at is 'soon'; give a time"),
        ("- {at: -3, do: kill, what: draft}", "at is -3; give a time"),
        ("- {at: true, do: kill, what: draft}", "at is True; give a time"),
        ("- {at: 3, do: hug, what: draft}", "do is 'hug'; use kill, term, stop, continue"),
        ("- {at: 3, do: kill, what: cat}", "what is 'cat'; use draft, target"),
        ("- {at: 3, do: kill, what: {role: engine, rank: 0}}", "name a rank as {role: target"),
        ("- {at: 3, do: kill, what: {role: draft, rank: -1}}", "name a rank as {role: target"),
        ("- {at: 3, do: kill, what: draft, for: 3s}", "only 'stop' has a length"),
    ],
)
def test_a_wrong_chaos_file_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_chaos(_file(tmp_path, text))
    assert said in str(raised.value)


def test_every_mistake_of_a_file_is_told_with_its_line(tmp_path: Path) -> None:
    text = "- {at: 3, do: hug, what: draft}\n\n- {at: 3, do: kill, what: draft}\n- 5\n"
    with pytest.raises(ConfigError) as raised:
        read_chaos(_file(tmp_path, text))
    lines = str(raised.value).splitlines()
    assert [line.split(":")[1] for line in lines] == ["1", "4"]


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be read"):
        read_chaos(tmp_path / "none.yaml")


# -- whom it hits ---------------------------------------------------------------------------------


def _status() -> ServerStatus:
    response = control_pb2.GetStatusResponse()
    for role, rank, pid, state in [
        ("engine", 0, 10, "ready"),
        ("target", 0, 11, "ready"),
        ("target", 1, 12, "lost"),
        ("draft", 0, 13, "ready"),
    ]:
        response.cluster.processes.add(role=role, rank=rank, pid=pid, state=state, node="here")
    return ServerStatus.from_proto(response)


def test_a_role_is_all_its_ranks_and_never_a_process_of_somebody_else() -> None:
    own = [9, 10, 11, 12]
    assert [m.pid for m in processes_of(_status(), ChaosTarget("target"), own)] == [11, 12]
    assert [m.is_ready for m in processes_of(_status(), ChaosTarget("target"), own)] == [
        True,
        False,
    ]
    assert [m.pid for m in processes_of(_status(), ChaosTarget("target", 1), own)] == [12]
    assert [m.pid for m in processes_of(_status(), ChaosTarget("engine"), own)] == [10]
    assert processes_of(_status(), ChaosTarget("draft"), own) == []


def test_ranks_are_found_though_the_server_itself_tells_of_gateways_alone() -> None:
    response = control_pb2.GetStatusResponse()
    response.cluster.processes.add(role="gateway", rank=0, pid=8, state="ready", node="here")
    response.engine.ranks.add(role="draft", rank=0, pid=13, host="here", state="ready")
    status = ServerStatus.from_proto(response)
    assert [m.pid for m in processes_of(status, ChaosTarget("draft"), [8, 13])] == [13]


def test_an_event_that_cannot_be_done_is_told_and_nothing_is_hit(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = ServerUnderTest(ServerSpec("gone", f"grpc://127.0.0.1:{port}"), tmp_path)
    planned = [
        PlannedEvent(0.0, "kill", ChaosTarget("draft")),
        PlannedEvent(0.05, "kill", ChaosTarget("server")),
    ]
    events = asyncio.run(Chaos(planned, server, tmp_path / "chaos.jsonl").run())
    # In the order of their ends, which may be the other one on a busy machine.
    assert {(event.what, event.pid) for event in events} == {("draft", None), ("server", None)}
    assert all("not on this host" in str(event.error) for event in events)
    assert read_events(tmp_path / "chaos.jsonl") == events


def test_other_servers_have_no_processes_that_chaos_knows(tmp_path: Path) -> None:
    server = ServerUnderTest(ServerSpec("v", "http://127.0.0.1:1"), tmp_path)
    with pytest.raises(ConfigError, match="Outrider's gRPC servers only"):
        Chaos([], server, tmp_path / "chaos.jsonl")


# -- the verdict ----------------------------------------------------------------------------------


def _record(
    name: str,
    sent_s: float,
    updates: Sequence[float],
    outcome: RequestOutcome = RequestOutcome.OK,
    tokens: Sequence[int] | None = None,
) -> RequestRecord:
    """`updates` are on the clock of the run."""
    return RequestRecord(
        *(name, "a", "c", 0, ShiftPhase.MEASURED, "x", sent_s, sent_s),
        end_s=max([sent_s, *updates]) + (0.01 if outcome is RequestOutcome.OK else 5.0),
        outcome=outcome,
        update_s=[at - sent_s for at in updates],
        token_ids=None if tokens is None else list(tokens),
    )


def _steady(start: float, end: float) -> list[float]:
    return [start + i / 10 for i in range(round((end - start) * 10))]


KILL = ChaosEvent(10.0, "kill", "draft 0", 5)


def test_a_silence_after_an_event_is_its_recovery_and_the_return_of_the_role_is_told() -> None:
    one = _record("one", 0.0, [*_steady(0.1, 10.05), *_steady(13.0, 20.0)], tokens=range(9))
    back = ChaosEvent(14.5, "back", "draft", 6, None, of_s=10.0)
    verdict = chaos_verdict([KILL, back], [one], [one])
    [recovery] = verdict.recoveries
    assert recovery.recovery_s == pytest.approx(3.0)
    assert recovery.silence_s == pytest.approx(3.0)
    assert recovery.back_s == pytest.approx(4.5)
    assert verdict.is_sound
    assert verdict.sentences == [
        "Of 1 requests 0 were lost; of 1 answers compared with an undisturbed run 0 had "
        "duplicated tokens, 0 had missing tokens, 0 were wrong.",
        "kill draft 0 at 10.0 s: tokens resumed after 3.0 s (3.0 s without a token), the draft was "
        "back after 4.5 s.",
    ]


def test_a_role_that_does_not_come_back_is_not_sound_even_if_tokens_flow() -> None:
    gone = ChaosEvent(190.0, "back", "draft", None, "not back within 180 s", of_s=10.0)
    verdict = chaos_verdict([KILL, gone], [_record("one", 0.0, _steady(0.1, 20.0))], [])
    assert not verdict.is_sound
    assert "no effect on clients, the draft is not back within 180 s." in verdict.sentences[1]


def test_an_event_that_nobody_notices_took_no_time() -> None:
    verdict = chaos_verdict([KILL], [_record("one", 0.0, _steady(0.1, 20.0))], [])
    assert verdict.recoveries[0].recovery_s == 0
    assert "no effect on clients" in verdict.sentences[1]
    assert "no answer could be compared" in verdict.sentences[0]


def test_time_in_which_nobody_asks_is_no_silence() -> None:
    before, after = _record("a", 0.0, _steady(0.1, 9.9)), _record("b", 60.0, _steady(60.1, 70.0))
    assert chaos_verdict([KILL], [before, after], []).recoveries[0].recovery_s == 0


def test_a_server_that_never_answers_again_is_not_sound() -> None:
    lost = _record("a", 0.0, _steady(0.1, 10.0), RequestOutcome.TIMEOUT)
    verdict = chaos_verdict([KILL], [lost], [])
    assert verdict.lost == ["a"] and not verdict.is_sound
    assert verdict.recoveries[0].recovery_s is None
    assert "no token arrived afterwards" in verdict.sentences[1]


def test_requests_that_had_failed_before_are_not_put_down_to_chaos() -> None:
    early = _record("early", 0.0, [], RequestOutcome.ERROR)  # ends at 5 s
    late = _record("late", 8.0, [], RequestOutcome.ERROR)
    fine = _record("fine", 0.0, _steady(0.1, 30.0))
    verdict = chaos_verdict([KILL], [early, late, fine], [])
    assert (verdict.lost, verdict.failed_before, verdict.requests) == (["late"], 1, 3)
    assert "1 requests had failed before the first event." in verdict.sentences


def test_ranks_that_were_hit_at_once_are_one_event_and_each_event_has_its_own_silence() -> None:
    updates = [*_steady(0.1, 10.0), *_steady(12.0, 30.0), *_steady(34.0, 40.0)]
    events = [
        ChaosEvent(10.0, "kill", "target 0", 5),
        ChaosEvent(10.001, "kill", "target 1", 6),
        ChaosEvent(30.0, "kill", "draft 0", 7),
    ]
    verdict = chaos_verdict(events, [_record("a", 0.0, updates)], [])
    assert [r.recovery_s for r in verdict.recoveries] == pytest.approx([2.0, 4.0], abs=0.11)


def test_answers_are_compared_by_ask_and_only_where_there_is_something_to_compare() -> None:
    text = list(range(100, 140))
    references = [_record(name, 0, [1], tokens=text) for name in "abcdef"]
    records = [
        _record("a", 0, [1], tokens=text),
        _record("b", 0, [1], tokens=[*text[:20], *text[16:36]]),
        _record("c", 0, [1], tokens=[*text[:20], *text[24:], 1, 2, 3, 4]),
        _record("d", 0, [1], tokens=[*text[:20], *range(20)]),
        _record("e", 0, [1]),
        _record("f", 0, [1], RequestOutcome.ERROR, tokens=text[:3]),
        _record("unknown", 0, [1], tokens=text),
    ]
    verdict = chaos_verdict([KILL], records, references)
    assert (verdict.duplicated, verdict.missing, verdict.wrong) == (["b"], ["c"], ["d"])
    assert verdict.compared == 4
    assert not verdict.is_sound


@given(st.integers(1, 30), st.integers(1, 20), st.booleans())
def test_doubled_and_missing_tokens_are_told_apart_wherever_they_are(
    at: int, count: int, is_cut: bool
) -> None:
    text = list(range(1000, 1080))
    count = min(count, at)
    doubled = [*text[:at], *text[at - count :]]
    without = [*text[:at], *text[at + count :]]
    assert (
        compare_answer(doubled[: len(text)] if is_cut else doubled, text) is AnswerMatch.DUPLICATED
    )
    assert compare_answer(without, text) is AnswerMatch.MISSING
    assert compare_answer(text[:at], text) is AnswerMatch.MISSING
    assert compare_answer(text, text) is AnswerMatch.SAME
    assert compare_answer([*text[:at], *[7] * (80 - at)], text) is AnswerMatch.WRONG


def test_an_answer_that_goes_on_too_long_is_wrong_or_doubled_but_never_the_same() -> None:
    text = list(range(20))
    assert compare_answer([*text, 99], text) is AnswerMatch.WRONG
    assert compare_answer([*text, *text[-5:]], text) is AnswerMatch.DUPLICATED
