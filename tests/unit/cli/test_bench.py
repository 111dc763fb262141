"""`outrider bench serve`: what is wrong is said in one sentence, before anything is started."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.cli.bench.running import _like, _without_secrets
from outrider.errors import OutriderError
from outrider.loadtest.arrivals import Constant
from outrider.loadtest.clients.shifts import LoadSpec

AT = ["--arm", "a=localhost:1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--rate 1 --duration 0", "--duration is 0"),
        ("--rate 1 --duration soon", "--duration is 'soon'"),
        ("--rate 1 --timeout 0s", "--timeout is 0"),
        ("--rate 1 --warm-up x", "--warm-up is 'x'"),
        ("--rate 1 --cool-down x", "--cool-down is 'x'"),
        ("--rate 1 --think-time x", "--think-time is 'x'"),
        ("--rate 1 --output x", "--output is 'x'"),
        ("--rate 1 --max-tokens 0", "--max-tokens is 0"),
        ("--rate 1 --turns 0", "--turns is 0"),
        ("--rate 1 --blocks 0", "--blocks is 0"),
        ("--rate 1 --client-processes 0", "--client-processes is 0"),
        ("--rate 1 --max-in-flight 0", "--max-in-flight is 0"),
        ("--rate 1 --requests 0", "--requests is 0"),
        ("--rate 1 --limit 0", "--limit is 0"),
        ("--rate 1 --retries -1", "--retries is -1"),
        ("--rate 1 --temperature -1", "--temperature is -1"),
        ("--rate 1 --temperature hot", "--temperature is 'hot'"),
        ("--rate x", "--rate is 'x'"),
        ("--rate 0", "the rate is 0"),
        ("--clients 1.5", "--clients is '1.5'"),
        ("--clients 0", "--clients is 0"),
        ("--rate 1 --clients 2", "--rate and --clients given"),
        ("", "no load given"),
        ("--rate 1 --arrivals x", "arrivals 'x'"),
        ("--rate 1 --arrivals ramp:1-2", "leave --rate out"),
        ("--rate 1 --find x", "--find is 'x'"),
        ("--rate 1,2 --find slo", "--find slo needs --slo"),
        ("--rate 1 --find slo --slo ttft=1s", "--find slo needs --rate"),
        ("--rate 1 --find knee", "--find knee needs --clients"),
        ("--rate 1,2 --temperature 0,1 --find slo --slo ttft=1s", "one --temperature"),
        ("--rate 1 --slo x", "slo 'x'"),
        ("--rate 1 --fail-if-not x", "threshold 'x'"),
        ("--rate 1 --fail-if-not b:errors==0", "names the arm 'b'; choose from a"),
        ("--rate 1 --fail-if-not errors==0@rate2", "names the load 'rate2'"),
        ("--rate 1 --baseline b", "--baseline is 'b'"),
        ("--rate 1 --idle sleep", "--idle is 'sleep'"),
        ("--rate 1 --header x", "--header is 'x'"),
        ("--rate 1 --prompts x", "prompts 'x'"),
        ("--rate 1 --arms-file /nowhere", "/nowhere cannot be read"),
        ("--rate 1 --chaos /nowhere", "/nowhere"),
        ("--rate 1 --arm b", "--arm is 'b'"),
    ],
)
def test_a_wrong_option_gives_one_sentence_that_names_it(options: str, said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *AT, *options.split()])
    assert isinstance(result.exception, OutriderError)
    assert said in str(result.exception) and "\n" not in str(result.exception)


def test_a_kept_command_has_no_secrets() -> None:
    given = ["--api-key", "k1", "--header=A: k2", "--header", "B: k3", "--api-key=k4"]
    given += ["--server", "v=vllm serve m --api-key k5 --port {port}", "--rate", "1"]
    shown = _without_secrets(given)
    assert not any(f"k{n}" in word for word in shown for n in range(1, 6))
    assert shown[-3:] == ["v=vllm serve m --api-key *** --port {port}", "--rate", "1"]


def test_a_search_keeps_the_shape_of_the_arrivals() -> None:
    load = LoadSpec("rate 1", "rate", 1, arrivals=Constant(1), prompt_range=(2, 5), temperature=0.7)
    like = _like(load, 2.3456)
    assert (like.name, like.arrivals, like.prompt_range) == ("rate 2.35", Constant(2.35), (2, 5))
    closed = _like(LoadSpec("clients 1", "clients", 1, clients=1, think_s=2), 8)
    assert (closed.name, closed.clients, closed.think_s) == ("clients 8", 8, 2)


def test_c_for_clients_still_works_and_says_what_to_give() -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *AT, "-c", "1.5"])
    assert "--clients is '1.5'" in str(result.exception)
    warning = "-c is deprecated here, as it is --config elsewhere; give --clients 1.5"
    assert warning in result.stderr
    result = CliRunner().invoke(app, ["bench", "serve", *AT, "-c", "1", "--clients", "2"])
    assert "give only --clients" in str(result.exception)
