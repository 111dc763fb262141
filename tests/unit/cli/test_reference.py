"""The page of all settings is the one that is made from them."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.reference import page, serve_flags
from outrider.config import settings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_what_the_types_say_today() -> None:
    assert PAGE.read_text() == page(), "run: make docs-reference"


def test_every_setting_is_on_the_page_with_its_variable_and_sentence() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(settings())
    for row, setting in zip(rows, settings().values(), strict=True):
        assert row.startswith(f"| `{setting.path}` | ")
        assert setting.env_name in row and setting.doc in row and setting.rule.expected in row


def test_flags_are_found_by_the_setting_they_set() -> None:
    flags = serve_flags()
    assert flags["server.port"] == "--port"
    assert flags["target.tensor_parallel"] == "--tensor-parallel-size"
    assert flags["server.processes"] == "--gateway-processes"
    assert "cache.block_size" not in flags
