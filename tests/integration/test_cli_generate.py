"""`outrider generate` as a user calls it, and the examples as they are."""

from __future__ import annotations

import io
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.cli import colour, main, summary
from outrider.cli import generate as command
from outrider.config import EngineConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = "smollm2-135m-draft"
ALONE = ("--model", SMALL, "--set", "cache.kv_cache_gb=0.1", "--temperature", "0")
PAIR = (*ALONE, "--draft-model", SMALL)
QUESTION = "Why is the sky blue?"
GREEN, MAGENTA = "\x1b[32m", "\x1b[35m"


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls the command; returns exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int | str | None, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["generate", *arguments])
        shown = capsys.readouterr()
        return left.value.code, shown.out, shown.err

    return call


@pytest.fixture(scope="module")
def answer() -> str:
    """What the small model answers in 24 tokens, by the Python interface."""
    llm = LLM(SMALL, kv_cache_gb=0.1)
    messages = [{"role": "user", "content": QUESTION}]
    [request] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))
    return request.outputs[0].text


def _colourless(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# -- what is printed ---------------------------------------------------------------------------


@pytest.mark.model
def test_the_text_goes_to_stdout_and_the_summary_to_stderr(outrider: Any, answer: str) -> None:
    code, out, err = outrider(QUESTION, *PAIR, "--max-tokens", "24")
    assert (code, out) == (0, answer + "\n")
    for label in ("acceptance rate", "block efficiency", "tokens/s", "time to first token"):
        assert label in err
    for label in ("draft share of time", "memory-bound speedup", "finish reason", "seed"):
        assert label in err


@pytest.mark.model
def test_drafts_and_own_tokens_have_two_colours_and_the_text_is_unchanged(
    outrider: Any, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    _, out, _ = outrider(QUESTION, *PAIR, "--policy", "fixed", "--max-tokens", "24")
    assert GREEN in out and MAGENTA in out
    assert _colourless(out) == answer + "\n"


@pytest.mark.model
def test_no_color_is_respected(outrider: Any, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = outrider(QUESTION, *PAIR, "--max-tokens", "24")
    assert out == answer + "\n"


@pytest.mark.model
def test_the_text_ends_before_a_stop_string(outrider: Any, answer: str) -> None:
    stop = answer[10:14]
    _, out, err = outrider(QUESTION, *PAIR, "--max-tokens", "24", "--stop", stop)
    assert out == answer[: answer.index(stop)] + "\n"
    assert re.search(r"finish reason +stop", err)


@pytest.mark.model
def test_compare_says_that_the_text_is_the_same(outrider: Any) -> None:
    sampled = ("--temperature", "0.8", "--deterministic", "--compare")
    code, _, err = outrider(QUESTION, *PAIR, *sampled, "--max-tokens", "16", "-k", "3")
    assert code == 0
    assert re.search(r"Same text at \d+\.\d\d times the speed of plain decoding\.", err)
    assert "speculative" in err and "plain" in err


@pytest.mark.model
def test_the_seed_shown_gives_the_same_sample_again(outrider: Any) -> None:
    sampled = (QUESTION, *ALONE, "--temperature", "1", "--max-tokens", "12")
    _, first, err = outrider(*sampled)
    seed = re.search(r"^seed +(\d+)", err, re.MULTILINE)
    assert seed is not None
    assert outrider(*sampled, "--seed", seed[1])[1] == first


@pytest.mark.model
@pytest.mark.parametrize("prompt", [("-",), ()])
def test_the_prompt_may_come_from_standard_input(
    outrider: Any, answer: str, monkeypatch: pytest.MonkeyPatch, prompt: tuple[str, ...]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
    assert outrider(*prompt, *ALONE, "--max-tokens", "24")[1] == answer + "\n"


@pytest.mark.model
def test_raw_continues_the_prompt_without_chat_template(outrider: Any) -> None:
    llm = LLM(SMALL, kv_cache_gb=0.1)
    [request] = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=8))
    _, out, _ = outrider(QUESTION, *ALONE, "--raw", "--max-tokens", "8")
    assert out == request.outputs[0].text + "\n"


# -- what is refused ---------------------------------------------------------------------------

REFUSED = [
    ((QUESTION, "--top-p", "3"), 2, "top_p is 3.0; it must be a number in (0, 1]."),
    ((QUESTION, "--depth", "99"), 2, "num_speculative_tokens is 99"),
    ((QUESTION, "--policy", "best"), 2, "--speculation-policy: speculation.policy is 'best'"),
    ((QUESTION, "--fix-depth"), 2, "--fix-depth needs a depth; give it with --depth."),
    ((QUESTION, "--model", "no-such-model"), 1, "'no-such-model' is neither a folder"),
    ((QUESTION, "--method", "draft", "--draft-model", "none"), 2, "there is no draft"),
    ((QUESTION, "--method", "off", "--compare"), 2, "--compare needs speculation"),
    ((QUESTION, *ALONE, "--raw", "--system", "Be brief."), 2, "--raw skips it"),
    (("", *ALONE, "--raw"), 2, "the prompt is empty"),
]


@pytest.mark.model
@pytest.mark.parametrize(("arguments", "exit_code", "message"), REFUSED)
def test_a_wrong_call_is_one_sentence(
    outrider: Any, arguments: tuple[str, ...], exit_code: int, message: str
) -> None:
    code, out, err = outrider(*arguments)
    assert (code, out) == (exit_code, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_missing_prompt_at_a_terminal_is_told(
    outrider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    code, _, err = outrider()
    assert code == 2 and "there is no prompt" in err


# -- which models ------------------------------------------------------------------------------

CONFIGURED: list[tuple[tuple[str, ...], str | None, str | None]] = [
    ((), SMALL, "draft"),
    (("--method", "draft"), SMALL, "draft"),
    (("--method", "ngram"), None, "ngram"),
    (("--method", "off"), None, None),
    (("--draft-model", "none"), None, None),
    (("--draft-model", "some/draft"), "some/draft", "draft"),
    (("--model", "some/model"), None, None),
    (("--set", "speculation.method=ngram"), None, "ngram"),
    (("--set", "draft.model=some/draft", "--draft-model", "some/draft"), "some/draft", "draft"),
    (("--set", "draft.model=none", "--draft-model", "none", "--method", "off"), None, None),
]


@pytest.mark.parametrize(("arguments", "draft", "method"), CONFIGURED)
def test_the_flags_choose_draft_and_method(
    outrider: Any,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    draft: str | None,
    method: str | None,
) -> None:
    seen: list[EngineConfig] = []

    def session(config: EngineConfig, *_: Any) -> Any:
        seen.append(config)
        return SimpleNamespace(run=lambda *_: None)

    monkeypatch.setattr(command, "_Session", session)
    assert outrider(QUESTION, *arguments)[0] == 0
    assert (seen[0].draft.model, seen[0].method) == (draft, method)


CONTRADICTIONS = [
    (
        ("--draft-model", "some/draft", "--set", "draft.model=none"),
        "--draft-model sets draft.model to 'some/draft' and --set to none",
    ),
    (
        ("--draft-model", "none", "--set", "draft.model=some/draft"),
        "--draft-model sets draft.model to none and --set to 'some/draft'",
    ),
    (
        ("--method", "off", "--set", "speculation.method=ngram"),
        "--method sets speculation.method to none and --set to 'ngram'",
    ),
    (
        ("--draft-model", "some/draft", "--method", "off"),
        "--draft-model is 'some/draft' and --method is 'off', but both set draft.model",
    ),
    (
        ("--compare", "--set", "cache.prefix_caching=true"),
        "--compare sets cache.prefix_caching to False and --set to True",
    ),
]


@pytest.mark.parametrize(("arguments", "problem"), CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(
    outrider: Any, arguments: tuple[str, ...], problem: str
) -> None:
    code, out, err = outrider(QUESTION, *arguments)
    assert (code, out, err) == (2, "", f"error: {problem}; give only one of them.\n")


# -- the parts ---------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose token ids are characters."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def test_text_held_back_keeps_the_colour_of_its_tokens() -> None:
    from outrider.text.detokenize import Detokenizer

    file = io.StringIO()
    text = colour.ColouredText(file, Detokenizer(Letters(), []))
    for tokens, num_accepted, shown in (("ab", 1, "a"), ("c", 0, ""), ("de", 1, "bcde")):
        ids = tuple(map(ord, tokens))
        is_drafted = [place < num_accepted for place in range(len(ids))]
        delta: Any = SimpleNamespace(token_ids=ids, is_drafted=is_drafted, text=shown)
        text.write(delta)
    assert _colourless(file.getvalue()) == "abcde"
    parts = re.findall(r"\x1b\[(\d+)m(.*?)\x1b\[0m", file.getvalue())
    assert [(colour, part) for colour, part in parts] == [
        *(("32", "a"), ("35", "bc")),
        *(("32", "d"), ("35", "e")),
    ]


def test_the_memory_bound_speedup_is_tau_over_c_gamma_plus_one() -> None:
    record = SimpleNamespace(block_efficiency=3.0, drafted=10, rounds=4)
    run: Any = SimpleNamespace(text=SimpleNamespace(speculation=record))
    built: Any = SimpleNamespace(
        config=EngineConfig.from_kwargs(draft_model=SMALL),
        draft=SimpleNamespace(num_params=10),
        target=SimpleNamespace(num_params=100),
    )
    assert summary.memory_bound_speedup(run, built) == pytest.approx(3.0 / (0.1 * 2.5 + 1))


def test_8_bit_weights_count_as_bytes_where_they_stay_so() -> None:
    record = SimpleNamespace(block_efficiency=3.0, drafted=10, rounds=4)
    run: Any = SimpleNamespace(text=SimpleNamespace(speculation=record))
    for kernels, cost_ratio in (("triton", 10 / 60), ("c", 10 / 100)):
        built: Any = SimpleNamespace(
            config=EngineConfig.from_kwargs(draft_model=SMALL, quantization="fp8"),
            facts=SimpleNamespace(kernels=kernels),
            draft=SimpleNamespace(num_params=10),
            target=SimpleNamespace(num_params=100, num_linear_weights=80),
        )
        expected = 3.0 / (cost_ratio * 2.5 + 1)
        assert summary.memory_bound_speedup(run, built) == pytest.approx(expected)


# -- examples ----------------------------------------------------------------------------------


@pytest.mark.model
def test_vllm_snippets_run_with_only_the_import_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(EXAMPLES / "vllm_snippets.py"), run_name="__main__")
    texts = re.findall(
        r"Prompt: 'The future of AI is', Generated text: (.+)", capsys.readouterr().out
    )
    assert len(texts) == 2 and all(len(text) > 10 for text in texts)


@pytest.mark.model
def test_the_offline_example_gives_the_same_text_without_speculation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(EXAMPLES / "offline.py"), run_name="__main__")
    assert capsys.readouterr().out.count("same text without speculation: True") == 2
