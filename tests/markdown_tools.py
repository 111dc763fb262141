"""What the documents say, as programs read it: links, headings, blocks of code."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^( *)(```+|~~~+)(\S*)")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s+(\S+)")
_REASON = re.compile(r"<!--\s*not run:\s*(.+?)\s*-->")


def documents() -> list[Path]:
    """Every document of the checkout."""
    found = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = found.stdout.splitlines() if found.returncode == 0 else []
    return sorted(ROOT / name for name in names if (ROOT / name).is_file())


@dataclass(frozen=True, slots=True)
class Block:
    """Fenced code. `reason` is why it is not run, from a comment on the line before."""

    language: str
    text: str
    line: int
    reason: str | None


def blocks(text: str) -> Iterator[Block]:
    lines, begin, indent, fence, language = text.splitlines(), 0, 0, "", ""
    for number, line in enumerate(lines, 1):
        found = _FENCE.match(line)
        if fence and line.strip() == fence:
            body = "\n".join(each[indent:] for each in lines[begin : number - 1])
            told = _REASON.search(lines[begin - 2]) if begin > 1 else None
            yield Block(language, body, begin, told[1] if told else None)
            fence = ""
        elif found and not fence:
            begin, indent, fence, language = number, len(found[1]), found[2], found[3]
    assert not fence, f"the block that begins on line {begin} has no end"


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines outside of code, with code in them blanked."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif found:
            fence = found[2]
        else:
            yield number, line


def links(text: str) -> Iterator[tuple[int, str]]:
    """Where each link leads, by line."""
    for number, line in prose(text):
        bare = re.sub(r"`[^`]*`", "``", line)
        for found in [*_LINK.finditer(bare), *_REFERENCE.finditer(bare)]:
            yield number, found[1]


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for _, line in prose(text):
        if heading := re.match(r"#{1,6} +(.*?)\s*#*$", line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found
