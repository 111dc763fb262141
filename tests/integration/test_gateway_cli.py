"""`outrider chat` and `outrider status` as a user calls them, against a server whose model is a
script."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeService, fake_service, scripted_token, tokenizer

from outrider.cli import main

GREEN, MAGENTA = "\x1b[32m", "\x1b[35m"
WORDS = "The quick brown fox jumps over the lazy dog and runs away."


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("gw")) as running:
        yield running


@pytest.fixture(autouse=True)
def said(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The model answers `WORDS` and ends."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    words: list[int] = [*tokenizer().encode(WORDS), 2]
    starts: dict[int, int] = {}

    def script(seed: int, position: int) -> int:
        return words[position - starts.setdefault(seed, position)]

    service.engine.script = script
    yield words
    service.engine.script = scripted_token


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def outrider(
    service: FakeService, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Calls a command with text on stdin, or with lines typed into a terminal."""

    def call(
        command: str, *arguments: str, piped: str = "", typed: list[Any] | None = None
    ) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(piped) if typed is None else FakeTerminal())
        lines = iter(typed or ())

        def read(prompt: str) -> str:
            line = next(lines, EOFError())
            if isinstance(line, BaseException):
                raise line
            return str(line)

        monkeypatch.setattr("builtins.input", read)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([command, "--server", service.server.grpc_address, *arguments])
        shown = capsys.readouterr()
        return left.value.code, shown.out, shown.err

    return call


def _prompt_of(service: FakeService, at: int = -1) -> str:
    text: str = tokenizer().decode(service.engine.submitted[at].spec.prompt_ids)
    return text


# -- chat -------------------------------------------------------------------------------------


def test_piped_text_is_answered_on_stdout_and_statistics_go_to_stderr(outrider: Any) -> None:
    code, out, err = outrider("chat", piped="Hello\n")
    assert (code, out) == (0, WORDS + "\n")
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s, first after .*, seed \d+", err)


def test_options_reach_the_server(outrider: Any, service: FakeService) -> None:
    options = ("--system", "Be brief.", "--temperature", "0.5", "--seed", "7", "--max-tokens", "3")
    outrider("chat", *options, "--method", "ngram", "-k", "1", piped="Hello")
    spec = service.engine.submitted[-1].spec
    assert "Be brief." in _prompt_of(service)
    assert (spec.params.temperature, spec.params.seed, spec.depth) == (0.5, 7, 1)
    assert (spec.params.max_tokens, spec.params.speculation) == (3, "ngram")


def test_drafts_and_own_tokens_have_two_colours_and_the_text_is_unchanged(
    outrider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    _, out, _ = outrider("chat", piped="Hello")
    assert GREEN in out and MAGENTA in out
    assert re.sub(r"\x1b\[[0-9;]*m", "", out) == WORDS + "\n"


def test_the_conversation_is_kept_until_it_is_reset(outrider: Any, service: FakeService) -> None:
    code, out, _ = outrider("chat", typed=["First", "Second", "/reset", "Third", "/quit", "No"])
    assert code == 0
    assert out.count(WORDS) == 3
    assert [word in _prompt_of(service, -2) for word in ("First", WORDS, "Second")] == [True] * 3
    assert [word in _prompt_of(service) for word in ("First", WORDS, "Third")] == [
        False,
        False,
        True,
    ]


def test_ctrl_c_at_the_prompt_stays_and_ctrl_d_leaves(outrider: Any) -> None:
    code, out, _ = outrider("chat", typed=[KeyboardInterrupt(), "Hello", EOFError()])
    assert code == 0
    assert WORDS in out


def test_ctrl_c_stops_the_answer_only_and_what_was_said_is_kept(
    outrider: Any, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.client import Chunk, Stream

    take = Stream.__next__

    def interrupted(self: Stream) -> Chunk:
        if len(self.completion.text) > 10 and self.completion.request_id not in interrupted_ids:
            interrupted_ids.append(self.completion.request_id)
            raise KeyboardInterrupt
        return take(self)

    interrupted_ids: list[str] = []
    monkeypatch.setattr(Stream, "__next__", interrupted)
    code, _, _ = outrider("chat", typed=["First", "Second"])
    assert code == 0
    kept = _prompt_of(service).partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    assert 10 < len(kept) < len(WORDS) and WORDS.startswith(kept)


def test_a_failed_turn_is_explained_and_not_kept(outrider: Any, service: FakeService) -> None:
    too_long = "word " * 600
    code, _, err = outrider("chat", typed=[too_long, "/nonsense", "Short"])
    assert code == 0
    assert "error: This model's maximum context length is" in err
    assert "unknown command /nonsense" in err
    assert "word word" not in _prompt_of(service)


def test_empty_standard_input_is_refused(outrider: Any) -> None:
    code, _, err = outrider("chat", piped=" \n")
    assert (code, err) == (
        2,
        "error: standard input is empty; pipe a message into outrider chat.\n",
    )


# -- status -----------------------------------------------------------------------------------


def test_status_shows_every_rank_load_and_acceptance(outrider: Any) -> None:
    code, out, _ = outrider("status")
    assert code == 0
    for row in (
        r"model +smollm2-135m-draft",
        r"state +serving",
        r"speculation +draft, shared verification",
        r"target +0 +101 +here +cpu +ready",
        r"target +1 +102 +here +cpu +ready",
        r"draft +0 +103 +here +cpu +starting",
        r"KV blocks +0 of 64 \(0%\)",
        r"acceptance +75\.0% \(30 of 40\)",
    ):
        assert re.search(row, out), row


def test_status_as_json_has_numbers_and_names(outrider: Any) -> None:
    _, out, _ = outrider("status", "--json")
    shown = json.loads(out)
    assert shown["engine"]["ranks"][2] == {
        "role": "draft",
        "rank": 0,
        "pid": 103,
        "host": "here",
        "device": "cpu",
        "state": "starting",
    }
    assert shown["settings"]["target_tensor_parallel"] == 1
    assert shown["engine"]["drafted_tokens"] == 40


@pytest.mark.parametrize("arguments", [("--watch",), ("--watch", "--json")])
def test_watching_goes_on_until_ctrl_c(
    outrider: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.status.time.sleep", nap)
    code, out, _ = outrider("status", *arguments)
    assert code == 130
    assert "serving" in out


@pytest.mark.parametrize("command", ["chat", "status"])
def test_a_server_that_is_not_there_is_one_sentence_and_exit_code_1(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    with pytest.raises(SystemExit) as left:
        main([command, "--server", "127.0.0.1:9"])
    shown = capsys.readouterr()
    assert left.value.code == 1
    assert shown.err == (
        "error: the server at 127.0.0.1:9 cannot be reached; start one with 'outrider serve' "
        "or give its address.\n"
    )
