"""What is killed, hangs or is cut off under load: every stream ends as if nothing had happened, new
requests are answered again, and nothing is left behind."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import kill_table
import pytest
from cluster_scenes import Controllers, RayNodes
from cut_connections import Direction
from hand_scenes import Apart, ByHand
from hosts import skip_reason
from kill_load import Newcomer, Running, is_same
from kill_scenes import (
    DRAIN_S,
    ENDING_S,
    Children,
    RayActors,
    RayWithHead,
    Replicas,
    Scene,
    Served,
    WithHead,
    WithHeadAndSpare,
    WithHeadOverRanks,
)
from waits import wait_until

from outrider.client import Client, UnavailableError
from outrider.restarts import FIRST_PAUSE_S, LONGEST_PAUSE_S

TOKENS_BEFORE = 12  # of every stream, when the fault comes
LAST_TOKENS = 60  # far behind that
REPORTED_S = 240.0
TIDY_S = 20.0
ENDED_S = DRAIN_S + ENDING_S
PAUSES = {
    "draft": r"; restarting in ([\d.]+) s",
    "target": r"restarting engine and models in ([\d.]+) s",
}
DRAINING = "told to stop"

Fault = Callable[[Any], set[int]]
"""Breaks a scene; the processes that must be replaced before it is whole again."""
Then = Callable[[Any], None]
"""What happens next, while requests wait."""


@dataclass(frozen=True)
class Case:
    """Those of one scene share it, so one that ends it is its last."""

    scene: type[Scene]
    name: str
    fault: Fault
    then: Then = lambda scene: None
    moves: bool = True  # whether streams must go on elsewhere
    may_ask_again: bool = False  # readers over HTTP, who cannot go on where they were
    ends: bool = False  # the server
    drafts_again: bool = False  # whoever drafts starts anew, and guesses as well as before
    says: tuple[str, ...] = ()  # patterns of what an operator is told
    is_slow: bool = False


def killed(role: str) -> Fault:
    return lambda scene: scene.signal(role)


def stopped(role: str) -> Fault:
    return lambda scene: scene.signal(role, signal.SIGSTOP)


def without_its_model(role: str, model: str = "") -> Fault:
    """Killed, and every new start of it fails."""

    def fault(scene: Any) -> set[int]:
        (scene.folder / (model or role)).rename(scene.folder / "away")
        lost: set[int] = scene.signal(role)
        return lost

    return fault


def backs_off_until_the_model_is_there(role: str, model: str = "") -> Then:
    def then(scene: Any) -> None:
        before = len(scene.said())

        def pauses_s() -> list[float]:
            return [float(each) for each in re.findall(PAUSES[role], scene.said()[before:])]

        try:
            wait_until(lambda: len(pauses_s()) >= 2, REPORTED_S, scene.said)
        finally:
            (scene.folder / "away").rename(scene.folder / (model or role))
        for pause_s, next_s in pairwise(pauses_s()):
            assert next_s == min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)

    return then


def cut_in_a_frame(role: str, direction: Direction) -> Fault:
    return lambda scene: scene.cut_inside_message(role, direction)


def terminated(scene: Served) -> set[int]:
    scene.terminate()
    return set()


def refuses_others(scene: Served) -> None:
    scene.server.wait_line("stopping")
    with (
        Client(scene.where.grpc_address, resume=False) as client,
        pytest.raises(UnavailableError, match="stopping"),
    ):
        client.generate("hello", max_tokens=1, timeout_s=20)


def reconnected(role: str) -> Then:
    def then(scene: Any) -> None:
        time.sleep(PARTED_S)
        scene.reconnect(role)

    return then


def united(scene: Any) -> None:
    time.sleep(PARTED_S)
    scene.unite()


TOLD_S = 20.0  # a process may be there a moment before somebody says so
PARTED_S = 15.0  # longer than anybody is silent on a link

CASES = [
    Case(
        Children, "draft killed", killed("draft"), moves=False, says=("draft lost, .* restarting",)
    ),
    Case(Children, "draft hangs", stopped("draft"), moves=False, is_slow=True),
    Case(Children, "target killed", killed("target"), is_slow=True),
    Case(
        *(Children, "target hangs", stopped("target")),
        says=(
            "target rank 0 .* (has not answered|has been silent) .* restarting engine",
            "serving again after",
        ),
    ),
    Case(Children, "engine killed", killed("engine"), says=("serving again after",)),
    Case(Children, "gateway killed", killed("gateway"), may_ask_again=True),
    Case(
        *(Children, "draft cannot start for a while", without_its_model("draft")),
        backs_off_until_the_model_is_there("draft"),
        moves=False,
        is_slow=True,
    ),
    Case(
        *(Children, "target cannot start for a while", without_its_model("target")),
        backs_off_until_the_model_is_there("target"),
        is_slow=True,
    ),
    Case(Children, DRAINING, terminated, refuses_others, moves=False, ends=True),
    Case(
        *(RayActors, "draft killed", killed("draft")),
        moves=False,
        says=(
            "draft lost, decoding goes on without it: draft rank 0: its process ended",
            r"draft back after [\d.]+ s \(pid \d+\)",
        ),
    ),
    Case(
        *(RayActors, "target killed", killed("target")),
        says=(
            r"target rank 0 was lost: .*; restarting engine and models in [\d.]+ s",
            "serving again after",
        ),
    ),
    Case(RayActors, "engine killed", killed("engine"), is_slow=True),
    Case(
        *(RayActors, "engine hangs", stopped("engine")),
        is_slow=True,
    ),
    Case(RayActors, "controller killed", killed("controller")),
    Case(RayActors, "gateway killed", killed("gateway"), may_ask_again=True, is_slow=True),
    Case(RayActors, DRAINING, terminated, refuses_others, moves=False, ends=True, is_slow=True),
    Case(
        *(RayNodes, "target's node lost", lambda scene: scene.lose_node_of("target")),
        is_slow=True,
    ),
    Case(
        *(RayNodes, "draft's node lost", lambda scene: scene.lose_node_of("draft")),
        moves=False,
        is_slow=True,
    ),
    Case(ByHand, "plan to the target cut in two", cut_in_a_frame("target", Direction.BACK)),
    Case(ByHand, "verdict cut in two", cut_in_a_frame("target", Direction.THERE), is_slow=True),
    Case(
        *(ByHand, "round to the draft cut in two", cut_in_a_frame("draft", Direction.BACK)),
        moves=False,
        is_slow=True,
    ),
    Case(ByHand, "updates cut in two", cut_in_a_frame("gateway", Direction.BACK)),
    Case(
        Apart,
        "target and draft parted",
        lambda scene: scene.part(),
        united,
        moves=False,
        is_slow=True,
    ),
    Case(
        *(Apart, "draft cut off", lambda scene: scene.cut_off("draft"), reconnected("draft")),
        moves=False,
        is_slow=True,
    ),
    Case(
        *(Apart, "engine cut off", lambda scene: scene.cut_off("engine"), reconnected("engine")),
        is_slow=True,
    ),
    Case(
        *(Apart, "target cut off", lambda scene: scene.cut_off("target"), reconnected("target")),
        is_slow=True,
    ),
    Case(WithHead, "target killed", killed("target"), drafts_again=True),
    Case(WithHead, "engine killed", killed("engine"), drafts_again=True, is_slow=True),
    Case(WithHead, "target hangs", stopped("target"), drafts_again=True, is_slow=True),
    Case(
        *(
            WithHead,
            "target cannot start for lack of its head",
            without_its_model("target", "head"),
        ),
        backs_off_until_the_model_is_there("target", "head"),
        drafts_again=True,
        is_slow=True,
    ),
    Case(WithHeadOverRanks, "a rank killed", killed("target"), drafts_again=True, is_slow=True),
    Case(WithHeadOverRanks, "engine killed", killed("engine"), drafts_again=True, is_slow=True),
    Case(WithHeadAndSpare, "engine killed", killed("engine"), drafts_again=True, is_slow=True),
    Case(WithHeadAndSpare, "target killed", killed("target"), drafts_again=True, is_slow=True),
    Case(RayWithHead, "target killed", killed("target"), drafts_again=True, is_slow=True),
    Case(RayWithHead, "engine killed", killed("engine"), drafts_again=True, is_slow=True),
    Case(Replicas, "target of one killed", killed("target"), is_slow=True),
    Case(Replicas, "engine of one killed", killed("engine"), is_slow=True),
    Case(
        *(Controllers, "gateway killed", lambda scene: scene.lose_gateway()),
        may_ask_again=True,
        is_slow=True,
    ),
    Case(
        *(Controllers, "driver's host lost", lambda scene: scene.lose_controller()),
        is_slow=True,
    ),
]


def _parameter(case: Case) -> Any:
    marks = [pytest.mark.model, pytest.mark.alone]
    if case.is_slow:
        marks.append(pytest.mark.slow)
    if issubclass(case.scene, RayActors):
        marks.append(pytest.mark.ray)
    return pytest.param(case.scene, case, id=f"{case.scene.name}: {case.name}", marks=marks)


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[kill_table.Row]]:
    found: list[kill_table.Row] = []
    yield found
    path: Path | None = request.config.getoption("--kill-table")
    if path is not None:
        kill_table.write(path, found)


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, pair: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    if request.param is Apart and (reason := skip_reason()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("models")
    made: Scene = request.param(folder)
    made.take_models(pair)
    made.start()
    try:
        made.expected = Running(made.where, speculates=False).results()
        yield made
        made.close()
    finally:
        made.kill()


def _origins(scene: Scene) -> list[Any]:
    """Who guessed each token of the load, once nothing is broken; its texts are the plain ones."""
    running = Running(scene.where)
    assert is_same(running.results(), scene.expected)
    assert {each for sample in _last(running.origins) for each in sample} > {"target"}
    return running.origins


def _last(origins: Any) -> list[list[str]]:
    """Of the last tokens of each sample. What is guessed follows from the text alone, and texts are
    the same; so a stream that went on elsewhere, with rounds that began at other tokens, is told
    from one that did not only until two of their rounds begin at the same one."""
    return [sample[-LAST_TOKENS:] for stream in origins for sample in stream]


def _is_said(scene: Scene, since: int, pattern: str) -> bool:
    return re.search(pattern, scene.said()[since:]) is not None


@pytest.mark.parametrize(
    ("scene", "case"), [_parameter(case) for case in CASES], indirect=["scene"], scope="module"
)
def test_no_stream_is_lost_and_new_requests_are_answered_again(
    scene: Scene, case: Case, rows: list[kill_table.Row]
) -> None:
    scene.footprint.note(scene.own_pids())
    if case.drafts_again and scene.origins is None:
        scene.origins = _origins(scene)
    running = Running(scene.where, may_ask_again=case.may_ask_again)
    running.wait_tokens(TOKENS_BEFORE)
    num_said, tally = len(scene.said()), scene.tally()
    fault_s = time.monotonic()
    lost = case.fault(scene)
    newcomer = None if case.ends else Newcomer(scene.where)
    case.then(scene)
    results = running.results()
    if newcomer is None:
        scene.close()
        assert time.monotonic() - fault_s < ENDED_S
    else:
        newcomer.join()
        scene.wait_whole(lost)
        wait_until(lambda: scene.tally() == tally, TIDY_S, lambda: f"{scene.tally()}, not {tally}")
    whole_s = time.monotonic() - fault_s
    are_same = [is_same(*each) for each in zip(results, scene.expected or (), strict=True)]
    rows.append(
        kill_table.Row(
            *(case.scene.name, case.name, running.num_moved, running.num_lost, all(are_same)),
            running.longest_pause_s(),
            None if newcomer is None else newcomer.accepted_s - fault_s,
            None if newcomer is None else newcomer.token_s - fault_s,
            whole_s,
        )
    )
    assert are_same == [True] * len(are_same), "streams that are others"
    assert not case.moves or running.num_moved > 0, "nothing has happened to any stream"
    if case.drafts_again:
        assert _last(running.origins) == _last(scene.origins), "streams that moved"
        assert _origins(scene) == scene.origins, "streams that came later"
    for pattern in case.says:
        wait_until(partial(_is_said, scene, num_said, pattern), TOLD_S, scene.said)
    scene.footprint.note(scene.own_pids())
