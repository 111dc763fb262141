"""The engine benchmark's plan, cases and tables."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.benchmarks import engine
from outrider.benchmarks.peers.comparison import TimedCall
from outrider.benchmarks.peers.plan import (
    ComparisonSettings,
    interpreter,
    plan_variants,
    start_peers,
)
from outrider.benchmarks.peers.protocol import Generation, PeerError, PeerInfo
from outrider.benchmarks.peers.report import (
    ComparisonSection,
    against,
    as_json,
    by_group,
    disturbance,
    overview,
)
from outrider.errors import ConfigError

SETTINGS = ComparisonSettings(
    target="smollm2-135m-instruct",
    draft="smollm2-135m-draft",
    engines=("outrider", "vllm"),
    groups=("qa",),
    per_group=1,
    chat=True,
    max_tokens=8,
    depths=(2, 4),
    ngram_depth=5,
    vllm_python=None,
    vllm_depth=2,
    batch=5,
    repeats=1,
    threads=2,
    max_model_len=2048,
)


def section() -> ComparisonSection:
    samples = tuple(
        TimedCall(variant, case, group, Generation([[1, 2]], seconds), 0.5, 0.0)
        for case, group in (("1", "qa"), ("2", "rag"))
        for variant, seconds in (("outrider plain", 1.0), ("vllm plain", 4.0))
    )
    return ComparisonSection("Single", "outrider plain", ("outrider plain", "vllm plain"), samples)


def test_the_plan_names_every_mode_of_the_chosen_engines_with_plain_first() -> None:
    names = [variant.name for variant in plan_variants(SETTINGS)]

    assert names == [
        *["outrider plain", "outrider n-gram", "outrider draft 2", "outrider draft 4"],
        *["outrider draft, as far as it pays", "outrider float32 plain"],
        *["vllm plain", "vllm draft 2"],
    ]


def test_llama_cpp_is_compared_plain_and_with_the_draft() -> None:
    settings = dataclasses.replace(SETTINGS, engines=("llama.cpp",), llama_depth=3)

    assert [variant.name for variant in plan_variants(settings)] == [
        "llama.cpp plain",
        "llama.cpp draft 3",
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("vllm", "--vllm-python names no interpreter"), ("llama.cpp", "--llama-python names no")],
)
def test_an_engine_without_an_interpreter_names_its_option(name: str, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        interpreter(SETTINGS, name)


def test_a_compiled_llama_server_needs_no_interpreter_of_its_own() -> None:
    settings = dataclasses.replace(SETTINGS, llama_server=sys.executable)

    assert interpreter(settings, "llama.cpp") == sys.executable
    with pytest.raises(PeerError, match="'nowhere', which is not a program"):
        interpreter(dataclasses.replace(SETTINGS, llama_server="nowhere"), "llama.cpp")


def test_an_engine_that_cannot_be_had_is_named_once_and_left_out(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        SETTINGS,
        target=str(tmp_path),
        engines=("vllm", "llama.cpp"),
        llama_server=sys.executable,
    )
    said: list[str] = []
    with ExitStack() as stack:
        peers = start_peers(settings, plan_variants(settings), stack, said.append)

    assert peers == {}
    assert [line.partition(" names")[0] for line in said[:2]] == [
        "vllm: skipped; --vllm-python",
        "vllm draft: skipped; --vllm-python",
    ]
    assert said[2:] == [
        f"llama.cpp: skipped; target is {tmp_path}, and llama.cpp reads GGUF files; name one."
    ]


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine 'tgi' is unknown"):
        dataclasses.replace(SETTINGS, engines=("tgi",))


def test_batches_are_full_and_too_few_prompts_are_repeated() -> None:
    prompts = [[1], [2], [3], [4], [5], [6], [7]]

    assert [case.prompts for case in engine.batch_cases(prompts, 3)] == [
        ([1], [2], [3]),
        ([4], [5], [6]),
    ]
    assert engine.batch_cases([[1], [2]], 3)[0].prompts == ([1], [2], [1])


def test_the_overview_shows_rates_and_ratios_to_the_reference() -> None:
    rows = {row[0]: row[1:4] for row in overview(section()).rows}

    assert rows["outrider plain"] == ("2.0", "2.0", "1.00")
    assert rows["vllm plain"] == ("0.5", "0.5", "0.25")


def test_a_table_against_peers_shows_times_faster() -> None:
    grid = against(section(), ["outrider plain"], ["vllm plain"])

    assert grid.rows == (("outrider plain", "4.00"),)
    assert grid.as_markdown().splitlines()[-1] == "| outrider plain | 4.00 |"


def test_gains_are_shown_for_each_group() -> None:
    grid = by_group(section(), ["vllm plain"])

    assert grid.header == ("", "qa", "rag")
    assert grid.rows == (("vllm plain", "0.25", "0.25"),)


def test_a_busy_machine_is_called_so() -> None:
    assert "busy" in disturbance(section().samples)


def test_the_result_file_holds_machine_versions_command_and_samples() -> None:
    info = PeerInfo({"vllm": "1"}, {"threads": "2"})
    result = json.loads(json.dumps(as_json([section()], {"vllm": info}, {"batch": 5})))

    assert {"command", "commit", "machine", "versions", "settings", "time"} < result.keys()
    assert result["versions"] == {"vllm": {"vllm": "1"}}
    assert result["peer_settings"] == {"vllm": {"threads": "2"}}
    assert len(result["sections"][0]["samples"]) == 4
    assert result["sections"][0]["ratios"]["outrider plain"]["vllm plain"]["value"] == 4.0


def test_a_prompt_that_does_not_fit_is_an_error_of_usage_without_a_trace() -> None:
    app = engine.app
    result = CliRunner().invoke(app, ["--group", "rag", "--max-model-len", "100"])

    assert result.exit_code == 2
    assert "raise --max-model-len" in result.output
    assert "Traceback" not in result.output
