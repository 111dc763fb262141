"""Kept results are named by a page, pages name results that exist, and the chart is current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_tools import ROOT, documents

DOCS = ROOT / "docs"
FOLDERS = ("results", "reports", "images")
KEPT = [
    kept
    for folder in FOLDERS
    for kept in sorted((DOCS / folder).iterdir())
    if kept.name != "__pycache__"
]
NAMED = re.compile(r"\b(?:results|reports|images)/[\w-]+(?:/[\w-]+)?(?:\.\w+)+")


def named_in(text: str) -> set[str]:
    return set(NAMED.findall(text))


PAGES = {
    page: named_in(page.read_text(encoding="utf-8"))
    for page in documents()
    if page.is_relative_to(DOCS) or page.parent == ROOT
}
ALL_NAMED = set().union(*PAGES.values())


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name)
def test_a_kept_result_is_named_by_a_page(kept: Path) -> None:
    name = str(kept.relative_to(DOCS))
    found = [each for each in ALL_NAMED if each == name or each.startswith(f"{name}/")]
    assert found, f"no page names docs/{name}: name it where its table is, or remove it"


def test_pages_name_results_that_exist() -> None:
    log = ROOT / "CHANGELOG.md"
    missing = [
        f"{page.name}: {name}"
        for page, names in PAGES.items()
        for name in sorted(names)
        if page != log and not (DOCS / name).exists()
    ]
    assert missing == []


def test_there_are_few_results() -> None:
    assert len(list((DOCS / "results").iterdir())) <= 20


def test_the_chart_is_drawn_from_the_results(tmp_path: Path) -> None:
    script = "import served, sys; sys.stdout.write(served.draw())"
    drawn = subprocess.run(
        [sys.executable, "-B", "-c", script],
        cwd=DOCS / "images",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    current = (DOCS / "images" / "served.svg").read_text(encoding="utf-8")
    assert drawn.stdout == current, "draw it anew: python docs/images/served.py"
