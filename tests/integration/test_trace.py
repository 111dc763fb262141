"""`outrider trace` as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outrider.cli import main

pytestmark = [pytest.mark.model, pytest.mark.alone]

SMALL = "smollm2-135m-draft"


def call(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["trace", "--model", SMALL, "--set", "cache.kv_cache_gb=0.1", *arguments])
    return left.value.code


def test_a_round_takes_two_hops_and_no_message_of_it_passes_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    code = call("--draft-model", SMALL, "-k", "2", "--rounds", "10", "--out", str(out))
    said = capsys.readouterr().out
    assert code in (0, None), said
    assert re.search(r"= outcome to draft [\d.]+ \+ draft [\d.]+ \+ proposals to target", said)
    kinds = re.findall(r"1\.00 a step  (\w+: .+)", said)
    assert sorted(kinds) == [
        "draft: send proposals",
        "engine: send to draft",
        "engine: send to target",
        "target: send outcome",
        "target: send verdict",
    ]
    events = json.loads(out.read_text())["traceEvents"]
    names = {each["args"]["name"] for each in events if each["ph"] == "M"}
    assert names == {"engine", "target", "draft"}


def test_without_a_draft_there_is_nothing_to_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--rounds", "2") not in (0, None)
    assert "choose one with --draft-model" in capsys.readouterr().err
