"""Tables and pictures of figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.benchmarks.proposers.__main__ import app
from outrider.benchmarks.proposers.report import markdown

ABOUT = {"device": "GPU", "prompts": 4, "mean_prompt_tokens": 9.5, "output_tokens": 8}
ABOUT |= {"temperature": 0.7}


def record(proposer: str, depth: int, **greedy: Any) -> dict[str, Any]:
    return {"proposer": proposer, "kind": "draft", "depth": depth, "greedy": greedy}


def rounds(tokens: float) -> dict[str, Any]:
    own = {"tokens_a_round": tokens, "acceptance": 0.5}
    return {
        "all": own,
        "by_category": {"oasst": own, "qa": own},
        "by_prompt_length": {"above 1200": own, "up to 256": own},
        "same_texts": 3,
        "texts": 4,
    }


def speed(rate: float) -> dict[str, Any]:
    own = {"decoding_tokens_per_s": rate, "whole_tokens_per_s": rate / 2, "draft_share": 0.25}
    own |= {"draft_ms": 1.0, "verify_ms": 3.0}
    return rounds(1.0) | {"all": own, "by_category": {"qa": own}, "by_prompt_length": {}}


def enlarged(ms: float) -> dict[str, Any]:
    return {
        **{"ms_per_token": ms, "tokens_a_round": 2.0, "draft_ms": 0.5, "verify_ms": 4.0},
        **{"host_ms": 0.01, "same_texts": 2, "texts": 2},
    }


FIGURES: dict[str, Any] = {
    "rounds": {
        "about": ABOUT,
        "records": [record("plain", 0, **rounds(1)), record("a", 5, **rounds(2.5))],
    },
    "speed": {
        "about": ABOUT,
        "records": [record("plain", 0, **speed(40)), record("a", 5, **speed(60))],
    },
    "enlarged_short": {
        "about": ABOUT,
        "records": [
            record("plain", 0, **enlarged(4)),
            record("a", 3, **enlarged(2.1)),
            record("a", 5, **enlarged(1.8)),
        ],
    },
}


def test_tables_have_the_figures_groups_in_their_order_and_the_best_depth_in_bold() -> None:
    lines = markdown(FIGURES).splitlines()

    assert "| a, depth 5 | 2.50 | 50% | 3 of 4 |" in lines
    assert "| a, depth 5 | 60.0 | 30.0 | 1.50 | 25% | 1.00 | 3.00 | 3 of 4 |" in lines
    assert lines.index("| qa | 2.50 |") < lines.index("| oasst | 2.50 |")
    assert lines.index("| up to 256 | 2.50 |") < lines.index("| above 1200 | 2.50 |")
    assert "| qa | 1.50 |" in lines
    assert "| a, depth 3 | 2.00 | 2.10 | 0.50 | 4.00 | 0.010 | 2 of 2 |" in lines
    assert "| a, depth 5 | 2.00 | **1.80** | 0.50 | 4.00 | 0.010 | 2 of 2 |" in lines
    assert "GPU, 4 prompts of 9.5 tokens on average, 8 output tokens." in lines
    assert not any("sampled" in line for line in lines)


def test_every_row_of_a_table_has_as_many_cells_as_its_heading() -> None:
    for block in markdown(FIGURES).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_parts_that_were_not_measured_have_no_tables() -> None:
    text = markdown({"enlarged_short": FIGURES["enlarged_short"]})

    assert text.startswith("### Enlarged to the 8B shape, short prompts, greedy")
    assert "One request" not in text and "Tokens a round, greedy" not in text
    assert markdown({}) == "Nothing was measured yet.\n"


def test_the_command_writes_tables_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "found.json").write_text(json.dumps(FIGURES))
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"

    done = CliRunner().invoke(
        app,
        ["report", str(tmp_path / "found.json"), "--markdown", str(page), "--plot", str(picture)],
    )

    assert done.exit_code == 0, done.output
    assert page.read_text() == markdown(FIGURES)
    assert picture.read_text().count("<svg") == 1


def test_there_must_be_something_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "found.json").write_text("{}")
    picture = tmp_path / "picture.svg"

    done = CliRunner().invoke(app, ["report", str(tmp_path / "found.json"), "--plot", str(picture)])

    assert done.exit_code != 0 and "nothing to draw" in done.output
    assert not picture.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "short"], "--parts has 'short'; choose from rounds, speed"),
        (["--depths", "three"], "--depths is 'three'"),
        (["--groups", "poetry"], "group 'poetry' is unknown"),
        (["--device", "tpu"], "--device is 'tpu'"),
    ],
)
def test_what_cannot_be_asked_for_is_said_in_a_sentence(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, options)

    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
