"""Speculation shown, changed and explained: a client, a real gateway and a real engine, whose
models alone are fakes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from fake_engine import fake_service
from speculation_tools import served_engines, speculating_loop
from waits import wait_until

from outrider.cli import main
from outrider.client import AsyncClient, Client, UnavailableError
from outrider.errors import RequestError
from outrider.proto import control_pb2, control_pb2_grpc

PROMPT = [1, 2, 3]


def outrider(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(("--log-level", "error", *arguments))
    shown = capsys.readouterr()
    return left.value.code, shown.out, shown.err


def policy_of(client: Client) -> tuple[str, int | None]:
    engine = client.status().engine
    assert engine is not None and engine.speculation is not None
    return engine.speculation.settings.policy, engine.speculation.settings.max_depth


def test_a_policy_is_changed_under_a_running_request_whose_text_stays(tmp_path: Path) -> None:
    loop = speculating_loop("fixed", acceptance=1.0)
    with served_engines(tmp_path, loop) as (_, client):
        plain = client.generate(PROMPT, max_tokens=120, seed=5, speculation="off", ignore_eos=True)
        stream = client.stream(PROMPT, max_tokens=120, seed=5, ignore_eos=True)
        first = next(stream)
        settings = client.set_speculation("off")
        assert (settings.policy, settings.first_policy) == ("off", "fixed")
        rest = list(stream)
        assert len(rest) > 2 and set(rest[-1].origins) == {"target"}
        sample = stream.completion.samples[0]
        assert len(first.token_ids) < 120
        assert sample.token_ids == plain.samples[0].token_ids
        drafted = stream.completion.speculation.drafted_tokens
        client.set_speculation("fixed", 1)
        bounded = client.generate(PROMPT, max_tokens=40, seed=5, ignore_eos=True)
        assert bounded.speculation.drafted_tokens == bounded.speculation.accepted_tokens
        assert drafted < 90  # as many as there are if three are drafted in every round
        assert bounded.speculation.block_efficiency <= 2


def test_an_engine_that_takes_over_is_set_as_the_one_before_it(tmp_path: Path) -> None:
    with served_engines(tmp_path, speculating_loop("fixed")) as (engines, client):
        client.set_speculation("threshold", 2)
        client.set_speculation("off")
        engines.stop()
        wait_until(lambda: client.status().state == "engine away")
        with pytest.raises(UnavailableError):
            client.set_speculation("goodput")
        engines.start(speculating_loop("fixed"))
        client.wait_ready(20)
        wait_until(lambda: policy_of(client) == ("off", 2))
        engine = client.status().engine
        assert engine is not None and engine.speculation is not None
        assert engine.speculation.settings.first_policy == "fixed"
        answer = client.generate(PROMPT, max_tokens=8, ignore_eos=True)
        assert answer.speculation.drafted_tokens == 0


def test_an_engine_that_takes_over_is_left_alone_where_nothing_was_set(tmp_path: Path) -> None:
    with served_engines(tmp_path, speculating_loop("fixed")) as (engines, client):
        engines.stop()
        wait_until(lambda: client.status().state == "engine away")
        engines.start(speculating_loop("trim"))
        client.wait_ready(20)
        assert policy_of(client) == ("trim", None)


def test_what_an_engine_has_done_is_explained_in_figures(tmp_path: Path) -> None:
    loop = speculating_loop("goodput", acceptance=1.0)
    with served_engines(tmp_path, loop) as (_, client):
        client.generate(PROMPT, max_tokens=60, ignore_eos=True)
        account = client.explain_speculation(last=5)
        numbers = [step.step for step in account.steps]
        assert numbers == list(range(numbers[-1] - 4, numbers[-1] + 1))
        drafted = [step for step in account.steps if step.num_drafts]
        assert drafted and drafted[0].chosen is not None
        assert drafted[0].committed == 4
        assert account.calibration_error is not None
        again = client.explain_speculation(step=numbers[1])
        assert again.steps == account.steps[1:2]
        with pytest.raises(RequestError, match=r"^step is 9999, but steps 1 to \d+ are remembered"):
            client.explain_speculation(step=9999)

        async def ask() -> tuple[str, int]:
            async with AsyncClient(client.address) as other:
                settings = await other.set_speculation(max_depth=2)
                found = await other.explain_speculation(last=3)
                return settings.policy, len(found.steps)

        assert asyncio.run(ask()) == ("goodput", 3)


def test_a_wrong_value_is_an_invalid_argument_in_one_sentence(tmp_path: Path) -> None:
    with (
        fake_service(tmp_path) as service,
        grpc.insecure_channel(service.server.grpc_address) as line,
    ):
        stub = control_pb2_grpc.ControlStub(line)
        wrong = [
            control_pb2.SetSpeculationRequest(policy="fastest"),
            control_pb2.SetSpeculationRequest(policy=""),
            control_pb2.SetSpeculationRequest(max_depth=2**31),
        ]
        for request in wrong:
            with pytest.raises(grpc.RpcError) as failed:
                stub.SetSpeculation(request, timeout=60)
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "it must be" in failed.value.details()
        with pytest.raises(grpc.RpcError) as failed:
            stub.ExplainSpeculation(control_pb2.ExplainSpeculationRequest(last=257), timeout=60)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for max_depth in (-1, 2**40):
            with pytest.raises(RequestError, match="it must be a whole number from 0 to 32"):
                service.client.set_speculation(max_depth=max_depth)
        with pytest.raises(RequestError, match="give one of the two"):
            service.client.set_speculation(max_depth=1, lift_max_depth=True)
        assert policy_of(service.client) == ("fixed", None)


def test_an_engine_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.gateway.routing.engine_link.BETWEEN_STEPS_TIMEOUT_S", 0.1)
    with fake_service(tmp_path, answers_status=False) as service:
        for ask in (service.client.set_speculation, service.client.explain_speculation):
            with pytest.raises(UnavailableError, match=r"has not answered for 0\.1 s"):
                ask()


# -- commands ---------------------------------------------------------------------------------


def test_commands_show_and_set_what_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_engines(tmp_path, speculating_loop("fixed")) as (_, client):
        server = ("--server", client.address)
        code, out, _ = outrider(capsys, "speculation", "show", *server)
        assert code == 0 and out.startswith("policy     fixed: at every step\nmax depth  none: ")
        code, out, _ = outrider(
            capsys, "speculation", "set", "--policy", "off", "--max-depth", "2", *server
        )
        assert code == 0 and "(initially fixed)" in out
        assert policy_of(client) == ("off", 2)
        outrider(capsys, "speculation", "set", "--max-depth", "none", *server)
        assert policy_of(client) == ("off", None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--policy", "fastest"), "error: the policy is 'fastest'; it must be one of goodput, "),
        (("--max-depth", "few"), "error: --max-depth is 'few'; it must be a whole number from 0 "),
        (("--max-depth", "33"), "error: the maximum depth is 33; it must be from 0 to 32, "),
        ((), "error: there is nothing to set; give --policy, --max-depth or both."),
    ],
)
def test_a_command_refuses_wrong_values_in_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    sentence: str,
) -> None:
    with fake_service(tmp_path) as service:
        server = ("--server", service.server.grpc_address)
        code, out, err = outrider(capsys, "speculation", "set", *options, *server)
        assert (code, out) == (2, "")
        assert err.startswith(sentence) and err.count("\n") == 1
        assert policy_of(service.client) == ("fixed", None)


def test_a_step_is_explained_at_the_terminal_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with served_engines(tmp_path, speculating_loop("goodput", acceptance=1.0)) as (_, client):
        server = ("--server", client.address)
        assert outrider(capsys, "explain", *server)[1] == "No step has been taken yet.\n"
        client.generate(PROMPT, max_tokens=60, ignore_eos=True)
        code, out, _ = outrider(capsys, "explain", *server)
        assert code == 0
        for part in (
            "(goodput): 1 row decodes",
            "tokens/s",
            "plain",
            "Chosen: ",
            "Then: ",
            "Calibration",
        ):
            assert part in out
        code, out, _ = outrider(capsys, "explain", "--json", "--last", "3", *server)
        shown = json.loads(out)
        assert code == 0 and len(shown["steps"]) == 3
        assert shown["steps"][-1]["candidates"][0]["tokens_per_s"] > 0
        code, _, err = outrider(capsys, "explain", "--step", "1", "--last", "3", *server)
        assert code == 2 and "give one of the two" in err


def test_the_status_shows_how_speculation_fares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with served_engines(tmp_path, speculating_loop("goodput", acceptance=1.0)) as (_, client):
        client.generate(PROMPT, max_tokens=60, ignore_eos=True)
        _, out, _ = outrider(capsys, "status", "--server", client.address)
        lines = {line[:20].strip(): line[20:].strip() for line in out.splitlines()}
        assert lines["policy"] == "goodput"
        assert lines["max depth"].startswith("3 ")
        assert lines["depth now"].endswith("of rows draft")
        assert lines["gain over plain"].endswith("times, estimated")
        assert {"recent acceptance", "agreement while off", "arrival rate"} <= set(lines)
        assert "calibration error" in lines and "warning" not in lines
        _, out, _ = outrider(capsys, "status", "--json", "--server", client.address)
        assert json.loads(out)["engine"]["speculation"]["settings"]["policy"] == "goodput"
