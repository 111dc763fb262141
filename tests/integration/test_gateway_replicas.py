"""A gateway before several engines: where requests go, and what becomes of them when one is lost,
drained, full or moved."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cut_connections import way_to
from fake_engine import (
    FakeEngine,
    fake_facts,
    fake_tokenizer_source,
    in_loop,
    places_of,
    running_server,
    scripted_token,
)
from metrics_tools import read_page
from waits import wait_until

from outrider.client import Client, Stream, UnavailableError
from outrider.errors import CapacityError
from outrider.gateway.frontend import Frontend
from outrider.gateway.routing import replicas as replicas_module
from outrider.gateway.routing.replicas import ReplicaLink, reachable
from outrider.kernels.seeds import sample_seed
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState
from outrider.links.gateway_messages import Submit, SubmitRefused
from outrider.links.speculation import SpeculationChange

pytestmark = [pytest.mark.thorough]

PROMPT = [10, 11, 12, 13]
SEED = 5
LONG = 200
OPTIONS: dict[str, Any] = {
    "n": 2,
    "seed": SEED,
    "max_tokens": 60,
    "logprobs": 2,
    "ignore_eos": True,
}


@dataclass(frozen=True, slots=True)
class Several:
    engines: list[FakeEngine]
    server: Frontend
    client: Client

    def publish(self, places: Iterable[ReplicaPlace], controller: str = "") -> None:
        in_loop(self.server, self.server.gateway.replicas.publish(controller, places))

    def forget(self, controller: str) -> None:
        in_loop(self.server, self.server.gateway.replicas.forget(controller))

    @property
    def replicas(self) -> dict[str, ReplicaLink]:
        return {each.name: each for each in self.server.gateway.replicas}

    def wait_connected(self, count: int) -> None:
        wait_until(lambda: len(self.server.gateway.replicas.connected) == count, 10)

    def begin(self, **options: Any) -> tuple[Stream, FakeEngine, FakeEngine]:
        """A long stream with its first tokens, the engine it is at, and the other one."""
        stream = self.client.stream(PROMPT, **OPTIONS | {"max_tokens": LONG} | options)
        for _ in itertools.islice(stream, 4):
            pass
        first, second = self.engines
        return (stream, first, second) if first.submitted else (stream, second, first)


@contextmanager
def several(folder: Path, count: int = 2, **options: Any) -> Iterator[Several]:
    """`options` are those of `FakeEngine`."""
    options = {"step_s": 0.01} | options
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch("outrider.gateway.served_model.load_tokenizer", fake_tokenizer_source)
        )
        engines = []
        for number in range(count):
            engines.append(FakeEngine(f"unix:{folder}/engine{number}.sock", **options).start())
            stack.callback(engines[-1].stop)
        server = stack.enter_context(running_server(engines, resubmit_timeout_s=10.0))
        client = stack.enter_context(Client(server.grpc_address))
        found = Several(engines, server, client)
        found.wait_connected(count)
        client.wait_ready(20)
        yield found


def expected(index: int, count: int = 60) -> list[int]:
    own = sample_seed(SEED, index)
    return [scripted_token(own, len(PROMPT) + position) for position in range(count)]


def tokens_of(stream: Stream) -> list[list[int]]:
    return [sample.token_ids for sample in stream.result().samples]


# -- where requests go ------------------------------------------------------------------------


def test_requests_are_spread_and_a_prompt_goes_where_it_went(tmp_path: Path) -> None:
    with several(tmp_path, step_s=0.001) as both:
        for number in range(24):
            both.client.generate([number] * 40, max_tokens=2)
        counts = [len(engine.submitted) for engine in both.engines]
        assert sum(counts) == 24 and min(counts) >= 4
        for _ in range(5):
            both.client.generate([7] * 40, max_tokens=2)
        more = [len(each.submitted) - n for each, n in zip(both.engines, counts, strict=True)]
        assert sorted(more) == [0, 5]


def test_a_prompt_that_many_have_at_once_spills_over(tmp_path: Path) -> None:
    with several(tmp_path) as both:
        for engine in both.engines:
            engine.is_paused = True
        streams = [both.client.stream(PROMPT, **OPTIONS) for _ in range(8)]
        wait_until(lambda: sum(len(engine.running) for engine in both.engines) == 16)
        assert max(len(engine.running) for engine in both.engines) <= 10
        for engine in both.engines:
            engine.is_paused = False
        assert all(tokens_of(stream) == [expected(0), expected(1)] for stream in streams)


def test_a_replica_whose_place_is_not_known_yet_takes_nothing_until_it_is(tmp_path: Path) -> None:
    with several(tmp_path, count=1) as one:
        nowhere = ReplicaPlace("1", (), ReplicaState.STARTING)
        one.publish([*places_of(one.engines), nowhere])
        assert one.replicas["1"].state == "starting"
        one.client.generate(PROMPT, max_tokens=2)
        other = FakeEngine(f"unix:{tmp_path}/other.sock").start()
        try:
            one.publish(places_of([*one.engines, other]))
            one.wait_connected(2)
            for number in range(12):
                one.client.generate([number] * 40, max_tokens=2)
            assert other.submitted
        finally:
            other.stop()


def test_a_socket_of_another_host_is_passed_over(tmp_path: Path) -> None:
    here = tmp_path / "here.sock"
    here.touch()
    far, near, wire = "unix:/nowhere/x.sock", f"unix:{here}", "tcp:10.0.0.1:5"
    assert reachable((far, wire)) == [wire]
    assert reachable((far, wire, near)) == [near, wire]
    assert reachable((far,)) == [far]


# -- when one is lost -------------------------------------------------------------------------


def test_requests_of_a_replica_that_is_killed_finish_at_the_other(tmp_path: Path) -> None:
    with several(tmp_path) as both:
        stream, at, other = both.begin()
        num_told = at.tokens_told
        at.stop()
        assert tokens_of(stream) == [expected(0, LONG), expected(1, LONG)]
        (submit,) = other.submitted
        assert submit.is_resumed and any(each.output_ids for each in submit.samples)
        assert num_told > 0 and stream.completion.resubmissions == 1
        done = both.client.generate(PROMPT, max_tokens=3)
        assert done.usage.completion_tokens == 3 and both.client.status().state == "serving"


def test_requests_survive_the_loss_of_one_after_the_other(tmp_path: Path) -> None:
    with several(tmp_path, deaths=[20, 70]) as both:
        stream = both.client.stream(PROMPT, **OPTIONS)
        assert tokens_of(stream) == [expected(0), expected(1)]
        assert stream.completion.resubmissions >= 2


def test_requests_of_a_replica_that_is_taken_away_go_on_at_the_other(tmp_path: Path) -> None:
    with several(tmp_path) as both:
        stream, at, other = both.begin()
        both.publish([p for p in places_of(both.engines) if p.addresses != (at.address,)])
        assert tokens_of(stream) == [expected(0, LONG), expected(1, LONG)]
        assert len(other.submitted) == 1
        wait_until(lambda: not at.running)


def test_a_replica_that_moves_is_found_where_it_is(tmp_path: Path) -> None:
    with several(tmp_path, count=1) as one:
        moved = FakeEngine(f"unix:{tmp_path}/moved.sock", step_s=0.01).start()
        stream = one.client.stream(PROMPT, **OPTIONS | {"max_tokens": LONG})
        next(stream)
        try:
            one.publish(places_of([moved]))
            assert tokens_of(stream) == [expected(0, LONG), expected(1, LONG)]
            assert len(moved.submitted) == 1
        finally:
            moved.stop()


# -- when one is drained ----------------------------------------------------------------------


def test_a_replica_that_is_drained_finishes_what_it_has_and_gets_nothing_new(
    tmp_path: Path,
) -> None:
    with several(tmp_path) as both:
        stream, at, other = both.begin()
        draining, serving = (ReplicaState.DRAINING, ReplicaState.SERVING)
        both.publish(
            dataclasses.replace(place, state=draining if engine is at else serving)
            for place, engine in zip(places_of(both.engines), both.engines, strict=True)
        )
        for number in range(12):
            both.client.generate([number] * 40, max_tokens=2)
        assert (len(at.submitted), len(other.submitted)) == (1, 12)
        assert tokens_of(stream) == [expected(0, LONG), expected(1, LONG)]
        assert stream.completion.resubmissions == 0
        states = {each.state for each in both.replicas.values()}
        assert states == {"draining", "serving"}


def test_until_its_successor_can_be_reached_a_drained_replica_takes_what_comes(
    tmp_path: Path,
) -> None:
    with several(tmp_path, count=1) as found:
        [old] = found.engines
        [place] = places_of([old])
        drained = dataclasses.replace(place, state=ReplicaState.DRAINING)
        late = FakeEngine(f"unix:{tmp_path}/late.sock", step_s=0.01)
        successor = ReplicaPlace("successor", (late.address,), ReplicaState.SERVING)
        found.publish([drained, successor])
        assert tokens_of(found.client.stream(PROMPT, **OPTIONS)) == [expected(0), expected(1)]
        late.start()
        try:
            wait_until(lambda: len(found.server.gateway.replicas.connected) == 2, 40)
            assert tokens_of(found.client.stream(PROMPT, **OPTIONS)) == [expected(0), expected(1)]
            assert (len(old.submitted), len(late.submitted)) == (1, 1)
        finally:
            late.stop()


def test_while_all_are_drained_new_requests_are_refused(tmp_path: Path) -> None:
    with several(tmp_path) as both:
        both.publish(places_of(both.engines, ReplicaState.DRAINING))
        with pytest.raises(UnavailableError, match="the engine is away"):
            both.client.generate(PROMPT)
        both.publish(places_of(both.engines))
        assert both.client.generate(PROMPT, max_tokens=2).usage.completion_tokens == 2


# -- when one is full -------------------------------------------------------------------------


def _is_full(submit: Submit) -> SubmitRefused:
    return SubmitRefused(submit.samples[0].handle, "too many requests wait; retry later.", True)


def test_what_one_has_no_room_for_goes_to_the_other(tmp_path: Path) -> None:
    with several(tmp_path, step_s=0.001) as both:
        full, free = both.engines
        full.refuse = _is_full
        for _ in range(3):
            stream = both.client.stream(PROMPT, **OPTIONS)
            assert tokens_of(stream) == [expected(0), expected(1)]
        for number in range(12):
            both.client.generate([number] * 40, max_tokens=2)
        assert full.submitted and len(free.submitted) == 15
        wait_until(lambda: both.replicas["0"].link.load == both.replicas["1"].link.load == 0)


def test_what_nobody_has_room_for_is_refused_after_each_was_asked_once(tmp_path: Path) -> None:
    with several(tmp_path, count=3, refuse=_is_full) as three:
        with pytest.raises(CapacityError, match="too many requests wait"):
            three.client.generate(PROMPT, **OPTIONS)
        assert [len(engine.submitted) for engine in three.engines] == [1, 1, 1]


def test_what_is_wrong_is_refused_by_the_first(tmp_path: Path) -> None:
    def refuse(submit: Submit) -> SubmitRefused:
        return SubmitRefused(submit.samples[0].handle, "it is wrong.", False)

    with several(tmp_path, refuse=refuse) as both:
        with pytest.raises(Exception, match="it is wrong"):
            both.client.generate(PROMPT)
        assert sum(len(engine.submitted) for engine in both.engines) == 1


# -- readers that come back -------------------------------------------------------------------


@pytest.mark.parametrize("at_other", [False, True])
def test_a_reader_that_was_cut_off_finds_its_request_where_it_is_held(
    tmp_path: Path, at_other: bool
) -> None:
    with (
        several(tmp_path) as both,
        running_server(both.engines) as another,
        way_to(both.server.grpc_address) as way,
        Client(way.address, resume_window_s=20.0) as client,
        Client(another.grpc_address) as ready,
    ):
        ready.wait_ready(20)
        client.wait_ready(20)
        for number in range(6):
            stream = client.stream([number, *PROMPT], resumable=True, **OPTIONS)
            for _ in itertools.islice(stream, 4):
                pass
            way.target = (another if at_other else both.server).grpc_address
            way.cut()
            own = sample_seed(SEED, 0)
            wanted = [scripted_token(own, len(PROMPT) + 1 + at) for at in range(60)]
            assert tokens_of(stream)[0] == wanted
        assert sum(len(engine.submitted) for engine in both.engines) == 6
        held = [is_held for engine in both.engines for _, is_held in engine.attached]
        assert held.count(True) == 6
        assert all(engine.submitted for engine in both.engines)


def test_a_request_is_released_where_it_is_held(tmp_path: Path) -> None:
    with several(tmp_path) as both:
        for number in range(6):
            stream = both.client.stream([number] * 40, resumable=True, **OPTIONS)
            next(stream)
            stream.cancel()
        wait_until(lambda: not any(engine.running for engine in both.engines))


# -- controllers ------------------------------------------------------------------------------


def test_replicas_of_a_lost_controller_serve_for_as_long_as_they_can_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "ORPHAN_S", 0.5)
    with several(tmp_path) as both:
        both.publish(places_of(both.engines), "c")
        both.publish((), "")
        both.wait_connected(2)
        assert sorted(both.replicas) == ["c/0", "c/1"]
        starting = ReplicaPlace("0", (), ReplicaState.STARTING)
        both.publish([starting], "d")
        both.forget("d")
        assert sorted(both.replicas) == ["c/0", "c/1"]
        both.forget("c")
        assert both.client.generate(PROMPT, max_tokens=2).usage.completion_tokens == 2
        both.engines[0].stop()
        wait_until(lambda: sorted(both.replicas) == ["c/1"], 30)
        link = both.replicas["c/1"].link
        both.publish(places_of(both.engines[1:]), "again")  # the same engine by another name
        assert sorted(both.replicas) == ["again/0"]
        assert both.replicas["again/0"].link is link and link.connected  # streams go on
        both.wait_connected(1)
        assert both.client.generate(PROMPT, max_tokens=2).usage.completion_tokens == 2


def test_a_replica_that_is_lost_with_its_controller_is_found_again(tmp_path: Path) -> None:
    with several(tmp_path) as both:
        both.publish(places_of(both.engines[:1]), "c")
        both.publish((), "")
        both.wait_connected(1)
        both.engines[0].stop()
        both.wait_connected(0)
        both.forget("c")
        wait_until(lambda: both.replicas["c/0"].link.num_failures > 0, 30)
        again = FakeEngine(both.engines[0].address).start()
        try:
            both.wait_connected(1)
            assert both.client.generate(PROMPT, max_tokens=2).usage.completion_tokens == 2
        finally:
            again.stop()


def numbers(several: Several) -> tuple[float, float]:
    """Replicas there should be, and those that take requests."""
    page = read_page(several.server.http_address)
    return page["outrider:replicas_configured"], page["outrider:replicas_ready"]


def series(several: Several, name: str) -> dict[str, float]:
    found = read_page(several.server.http_address).values
    return {
        dict(labels)["replica"]: value for (each, labels), value in found.items() if each == name
    }


def test_a_replica_that_is_lost_with_its_controller_is_missed_until_another_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "ORPHAN_S", 0.5)
    with several(tmp_path) as both, mock.patch("outrider.gateway.metrics.page.KEEP_S", 0.0):
        first, second = places_of(both.engines)
        both.publish([first], "c")
        both.publish([second], "d")
        both.publish((), "")
        both.wait_connected(2)
        assert numbers(both) == (2, 2)
        both.engines[0].stop()
        both.forget("c")
        wait_until(lambda: sorted(both.replicas) == ["d/1"], 10)
        assert series(both, "outrider:engine_up") == {"0": 0.0, "1": 1.0}
        assert numbers(both) == (2, 1)
        nobody = ReplicaPlace("0", (), ReplicaState.STARTING)
        both.publish([nobody], "another controller")
        assert numbers(both) == (2, 1)
        assert series(both, "outrider:engine_up") == {"0": 0.0, "1": 1.0}


def test_a_replica_is_not_missed_whose_successor_came_before_it_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "ORPHAN_S", 0.5)
    with several(tmp_path) as both, mock.patch("outrider.gateway.metrics.page.KEEP_S", 0.0):
        first, second = places_of(both.engines)
        both.publish([first], "c")
        both.publish((), "")
        both.publish([dataclasses.replace(second, name="0")], "its successor")
        both.wait_connected(2)
        both.engines[0].stop()
        both.forget("c")
        wait_until(lambda: sorted(both.replicas) == ["its successor/0"], 10)
        assert numbers(both) == (1, 1)
        assert series(both, "outrider:engine_up") == {"0": 1.0}


def test_a_replica_that_its_controller_has_drained_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "ORPHAN_S", 0.5)
    with several(tmp_path) as both, mock.patch("outrider.gateway.metrics.page.KEEP_S", 0.0):
        first, second = places_of(both.engines)
        both.publish([first], "c")
        both.publish([second], "d")
        both.publish((), "")
        both.wait_connected(2)
        both.publish([dataclasses.replace(first, state=ReplicaState.DRAINING)], "c")
        assert numbers(both) == (1, 1)
        both.engines[0].stop()
        both.forget("c")
        wait_until(lambda: sorted(both.replicas) == ["d/1"], 10)
        assert numbers(both) == (1, 1)
        assert series(both, "outrider:engine_up") == {"1": 1.0}


# -- models, settings, status -----------------------------------------------------------------


def test_a_replica_with_another_model_is_not_used_until_there_is_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with several(tmp_path, count=1) as one:
        facts = fake_facts()
        facts.settings["target.model"] = "another"
        other = FakeEngine(f"unix:{tmp_path}/other.sock", facts=facts).start()
        try:
            one.publish(places_of([*one.engines, other]))
            one.wait_connected(2)
            for number in range(12):
                one.client.generate([number] * 40, max_tokens=2)
            assert not other.submitted
            assert caplog.text.count("a replica has the model another") == 1
            one.publish(places_of([other]))
            wait_until(lambda: one.client.status().model == "another")
            assert one.client.generate(PROMPT, max_tokens=2).usage.completion_tokens == 2
            assert other.submitted
        finally:
            other.stop()


def test_what_is_set_of_speculation_holds_at_all_and_at_those_to_come(tmp_path: Path) -> None:
    with several(tmp_path) as both:
        both.client.set_speculation(max_depth=1)
        wanted = SpeculationChange(None, True, 1)
        assert [e.speculation.status().settings.max_depth for e in both.engines] == [1, 1]
        third = FakeEngine(f"unix:{tmp_path}/third.sock").start()
        try:
            both.publish(places_of([*both.engines, third]))
            both.wait_connected(3)
            wait_until(lambda: third.speculation.status().settings.max_depth == wanted.max_depth)
        finally:
            third.stop()


def test_the_status_has_every_replica(tmp_path: Path) -> None:
    with several(tmp_path) as both:
        stream, at, _ = both.begin()
        state = both.client.status()
        assert state.engine is not None
        assert [(each.name, each.state) for each in state.replicas] == [
            ("0", "serving"),
            ("1", "serving"),
        ]
        index = both.engines.index(at)
        assert [each.load for each in state.replicas][index] == 2
        assert all(each.engine is not None for each in state.replicas)
        both.engines[1 - index].stop()
        wait_until(lambda: both.client.status().replicas[1 - index].state == "away")
        assert both.client.status().replicas[1 - index].engine is None
        stream.cancel()


def test_the_page_of_metrics_has_the_engine_metrics_of_every_replica(tmp_path: Path) -> None:
    with several(tmp_path) as both:
        page = read_page(both.server.http_address)
        assert page.by("outrider:engine_up", "replica") == {"0": 1, "1": 1}
        assert page.by("outrider:engine_steps_total", "replica") == {"0": 10, "1": 10}
