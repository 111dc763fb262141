"""The documents: links lead somewhere, pages are listed, tests they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_tools import ROOT, anchors, documents, links

DOCS = ROOT / "docs"
ELSEWHERE = ("http://", "https://", "mailto:")


def broken_links(page: Path, text: str) -> list[str]:
    """What a link of a page with that text leads to that is not there, with its line."""
    broken = []
    for line, link in links(text):
        if link.startswith(ELSEWHERE):
            continue
        name, _, anchor = link.partition("#")
        there = (page.parent / name).resolve() if name else page
        place = f"{page.name}:{line}: {link}"
        if name and not there.exists():
            broken.append(f"{place}: there is no such file")
        elif not there.is_relative_to(ROOT):
            broken.append(f"{place}: leads out of the checkout")
        elif anchor and there.suffix == ".md":
            headings = anchors(there.read_text() if name else text)
            broken += [] if anchor in headings else [f"{place}: there is no such heading"]
    return broken


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gone](nowhere.md)", "there is no such file"),
        ("[gone](http.md#no-such-heading)", "there is no such heading"),
        ("[gone](#no-such-heading)", "there is no such heading"),
        ("![gone](images/none.png)", "there is no such file"),
        ("[out](../../elsewhere/)", "there is no such file"),
        ("[ref]: nowhere.md", "there is no such file"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(text: str, complaint: str) -> None:
    [found] = broken_links(DOCS / "README.md", f"# Head\n\n{text}\n")
    assert complaint in found


@pytest.mark.parametrize(
    "text", ["`[not](a-link.md)`", "```\n[not](a-link.md)\n```", "[there](http.md#fields)"]
)
def test_what_is_no_link_or_leads_somewhere_is_not_complained_of(text: str) -> None:
    assert broken_links(DOCS / "README.md", text) == []


def test_the_index_lists_every_page_and_the_readme_leads_to_it() -> None:
    listed = {link.partition("#")[0] for _, link in links((DOCS / "README.md").read_text())}
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert pages - listed == set()
    assert "docs/README.md" in {link for _, link in links((ROOT / "README.md").read_text())}


def test_the_architecture_lists_every_page_of_a_part() -> None:
    listed = {link for _, link in links((DOCS / "architecture.md").read_text())}
    assert {f"internals/{page.name}" for page in (DOCS / "internals").glob("*.md")} <= listed


def test_code_that_pages_name_is_there() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in documents()
        if page.name != "CHANGELOG.md"
        for name in named_code(page.read_text())
        if not any((ROOT / folder / name).is_file() for folder in ("", "src/outrider", "loadtest"))
    ]
    assert missing == []


def named_code(text: str) -> list[str]:
    """Files of code in backticks, by their place in the checkout or in the package."""
    found = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|c|h|proto))(?:::?[\w.]+)?`", text)
    return [name for name in found if "..." not in name]


@pytest.mark.parametrize("text", ["`gateway/none.py`", "see `kernels/cpu/none.c`, then `a.py`"])
def test_code_that_is_not_there_is_found(text: str) -> None:
    [name] = named_code(text)
    assert not (ROOT / name).exists()


def test_the_glossary_is_short() -> None:
    text = (DOCS / "glossary.md").read_text()
    words = re.findall(r"^\| ([\w -]+) \|", text, re.MULTILINE)
    assert 20 < len(words) - 1 <= 30 and len(words) == len(set(words))


def test_the_guarantees_name_tests_that_exist() -> None:
    text = (DOCS / "guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    missing = []
    for file, test in named:
        path = ROOT / file
        if not path.is_file() or (test and not re.search(rf"def {test}\b", path.read_text())):
            missing.append(f"{file}::{test}")
    assert missing == []


def test_every_guarantee_names_a_test() -> None:
    text = (DOCS / "guarantees.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| what", "| ---", "| :"))]
    assert promises and [row for row in promises if "`tests/" not in row] == []
