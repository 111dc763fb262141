"""Arms as they are written, and every way to write them wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.loadtest.arms import read_arms
from outrider.loadtest.servers.server import Idle
from outrider.loadtest.targets.base import TargetSpec
from outrider.loadtest.units import numbers_of, seconds_of

COMMON = TargetSpec("", extras={"top_k": 1}, headers={"X": "1"})
OURS = "ours=outrider serve --no-ray --port 0 --grpc-port {port}"


def test_arms_of_one_address_share_a_server_and_fields_are_typed() -> None:
    off, deep = read_arms(
        ["off=localhost:50051?speculation=off", "deep=localhost:50051?num_speculative_tokens=4"],
        [], None, COMMON,
    )  # fmt: skip
    assert off.server is deep.server and off.server.url == "grpc://localhost:50051"
    assert off.target.extras == {"top_k": 1, "speculation": "off"}
    assert deep.target.extras == {"top_k": 1, "num_speculative_tokens": 4}


def test_servers_alone_are_their_own_arms_and_rest_by_their_kind() -> None:
    ours, fake = read_arms([], [OURS, "fake=python x.py {port}"], None, COMMON)
    assert (ours.server.url, ours.server.idle) == ("grpc://127.0.0.1:{port}", Idle.STOP)
    assert (fake.server.url, fake.server.idle) == ("http://127.0.0.1:{port}", Idle.PAUSE)
    [alone, _] = read_arms(["a=ours?x=1", "b=ours"], [OURS], None, COMMON)
    assert alone.server.idle is Idle.LEAVE
    left, _ = read_arms([], [OURS, "fake=python x.py {port}"], None, COMMON, Idle.LEAVE)
    assert left.server.idle is Idle.LEAVE


def test_a_file_names_servers_and_arms_and_off_is_a_name(tmp_path: Path) -> None:
    file = tmp_path / "arms.yaml"
    file.write_text(
        "servers:\n  s: {command: 'run {port}', env: {A: 1}, ready_timeout_s: 5, idle: stop}\n"
        "arms:\n  off: {server: s, extras: {speculation: off, flag: true}}\n"
        "  web: {url: 'http://h/v1', headers: {Y: z}}\n"
    )
    off, web, more = read_arms(["more=h:1"], [], file, COMMON)
    assert (off.name, off.target.extras["speculation"], off.target.extras["flag"]) == (
        "off", "off", True,
    )  # fmt: skip
    assert (off.server.env, off.server.idle) == ({"A": "1"}, Idle.STOP)
    assert web.target.headers == {"X": "1", "Y": "z"} and web.server.command is None
    assert more.server.url == "grpc://h:1"


@pytest.mark.parametrize(
    ("arms", "servers", "said"),
    [
        (["x"], [], "--arm is 'x'"),
        (["=h:1"], [], "--arm is '=h:1'"),
        (["a=h:1", "a=h:2"], [], "'a' is given twice"),
        (["a=our"], [OURS], "neither host:port.*servers ours"),
        (["a=http://h:port"], [], "a' is at 'http://h:port'"),
        (["a=h:99999"], [], "a' is at 'h:99999'"),
        (["localhost:50051?speculation=off"], [], "is at 'off'"),
        ([], ["ours=outrider serve"], "has no {port}"),
        ([], ["s='run {port}"], "close its quotes"),
        ([], ["s=outrider 'serve {port}"], "close its quotes|closing quotation"),
        ([], ["s"], "--server is 's'"),
    ],
)
def test_what_is_written_wrongly_is_named(arms: list[str], servers: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read_arms(arms, servers, None, COMMON)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "", "[1]", "{", "servers:", "arms: {a: 1}", "arms: {4: {url: 'h:1'}}", "other: {}",
        "arms: {a: {}}", "arms: {a: {server: x}}", "arms: {a: {url: 5}}", "arms: {a: {ulr: 'h:1'}}",
        "arms: {a: {url: 'h:1', extras: 5}}", "arms: {a: {url: 'h:1', headers: [x]}}",
        "arms: {a: {url: 'h:1', channels: x}}", "servers: {s: {command: 5}}",
        "servers: {s: {command: 'x {port}', env: [A]}}", "servers: {s: {}}",
        "servers: {s: {command: 'x {port}', ready_timeout_s: soon}}",
        "servers: {s: {command: 'x {port}', ready_timeout_s: -1}}",
        "servers: {s: {command: 'x {port}', idle: sleep}}", "servers: {s: {command: ''}}",
    ],
)  # fmt: skip
def test_a_wrong_file_gives_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "arms.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_arms([], [], file, COMMON)
    assert "\n" not in str(raised.value) and str(raised.value).endswith(".")


def test_times_and_numbers_are_read_as_people_write_them() -> None:
    texts = ("500ms", "30s", "5m", "5min", "8h", "2", " 1.5 s ")
    assert [seconds_of(text, "--x") for text in texts] == [0.5, 30, 300, 300, 28800, 2, 1.5]
    assert numbers_of("1, 2,1,0.5", "--x") == [1, 2, 0.5]
    for wrong in ("", "x", "-1s", "1d", "nan", "1e999h", "--5"):
        with pytest.raises(ConfigError, match="--x is "):
            seconds_of(wrong, "--x")
    for wrong in ("", ",", "1;2", "inf", "nan"):
        with pytest.raises(ConfigError, match="--x is "):
            numbers_of(wrong, "--x")


def test_what_an_arm_asks_of_ours_is_checked_before_anything_starts(tmp_path: Path) -> None:
    from outrider.cli import main

    with pytest.raises(SystemExit) as ended:
        main(
            ["bench", "serve", "--arm", "a=localhost:1?nonsense=1", "--rate", "1"]
            + ["--out", str(tmp_path / "run")]
        )
    assert ended.value.code == 2 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text",
    ["[" * 3000, "arms:\n  a: &a {x: 1}\n" + "".join(f"  b{i}: {{y: *a}}\n" for i in range(9999))],
    ids=["deep", "many"],
)
def test_a_file_that_would_grow_without_end_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "arms.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="arms.yaml"):
        read_arms((), (), file, TargetSpec(url="inprocess:"))


def test_what_stands_behind_inprocess_configures_the_engine() -> None:
    [arm] = read_arms(
        ["e=inprocess:?model=x&draft_model=y"], (), None, TargetSpec(url="inprocess:")
    )
    assert arm.target.url == "inprocess:?model=x&draft_model=y" and not arm.target.extras
