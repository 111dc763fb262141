"""The table of kills: what each cost, as a page of the documentation."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

COMMAND = "python -m pytest tests/integration/test_kills.py --kill-table docs/results/kills.md"
_HEADINGS = (
    "where",
    "what happens",
    "streams moved",
    "asked again",
    "same text",
    "longest pause",
    "accepted after",
    "first new token",
    "whole after",
)
_TEXT = """# What kills cost

Each line is a case of [test_kills.py](../../tests/integration/test_kills.py). Eight streams (gRPC
and HTTP, greedy and sampled, n = 2, penalties, log-probabilities, seeds) have a dozen tokens each
when it happens. All of them are read to the end and compared with an undisturbed run; at the end
of each group nothing of the server may be left: process, port, shared memory, file, Ray resource.

- **streams moved**: those over gRPC that went on at another engine or over another connection.
- **asked again**: how often, until it was answered, by readers over HTTP whose gateway was lost.
- **longest pause** between two pieces of any stream, in seconds, as are all times.
- **accepted after**: until a new request was taken in; **first new token**: until it had one.
- **whole after**: until every process was there again, all streams done; of a server that is told
  to stop, until it had ended.

Measured on {machine}, which did nothing else, with a pair of models so small that
nearly all the time is that of starting processes. A hung rank is waited for as long as
`stall_timeout_s` says, here 5 s; a network is parted for 15 s. Made by

```sh
{command}
```

{table}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds are from the fault on; None is a dash."""

    where: str
    what: str
    num_moved: int
    num_lost: int
    is_same: bool
    pause_s: float
    accepted_s: float | None
    token_s: float | None
    whole_s: float


@dataclass(frozen=True, slots=True)
class Page:
    """A page with one table, whose rows the first two cells name."""

    text: str
    headings: Sequence[str]
    command: str

    def write(self, path: Path, rows: Iterable[Sequence[object]]) -> None:
        """Rows of cases that did not run this time stay as they are."""
        lines = self._old_lines(path)
        for row in rows:
            lines[str(row[0]), str(row[1])] = _line(map(_cell, row))
        head = [_line(self.headings), _line("---" for _ in self.headings)]
        machine = f"{os.cpu_count()} cores ({platform.machine()})"
        table = "\n".join([*head, *lines.values()])
        path.write_text(self.text.format(machine=machine, command=self.command, table=table))

    def _old_lines(self, path: Path) -> dict[tuple[str, str], str]:
        found = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("|") and len(cells) == len(self.headings):
                found[cells[0], cells[1]] = line
        found.pop((self.headings[0], self.headings[1]), None)
        found.pop(("---", "---"), None)
        return found


def write(path: Path, rows: Iterable[Row]) -> None:
    Page(_TEXT, _HEADINGS, COMMAND).write(path, map(astuple, rows))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
