"""The comparison of proposers with the bundled pair, from command to table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.benchmarks.proposers.__main__ import app

pytestmark = pytest.mark.model


def test_the_bundled_draft_is_compared_with_plain_decoding(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = ["--groups", "qa,humaneval", "--per-group", "1", "--tokens", "6", "--depths", "3"]
    options += ["--no-ngram", "--device", "cpu", "--deterministic", "--out", str(out)]

    done = CliRunner().invoke(app, options)

    assert done.exit_code == 0, done.output
    figures = json.loads(out.read_text())
    for part in ("rounds", "speed"):
        records = figures[part]["records"]
        assert [each["proposer"] for each in records] == ["plain", "draft"]
        assert all(each["greedy"]["same_texts"] == 2 for each in records)
        assert figures[part]["about"]["groups"] == ["humaneval", "qa"]
    draft = figures["rounds"]["records"][1]["greedy"]
    assert draft["all"]["tokens_a_round"] > 1.2
    assert draft["by_category"].keys() == {"humaneval", "qa"}
    shown = CliRunner().invoke(app, ["report", str(out)])
    assert "| draft, depth 3 |" in shown.output
