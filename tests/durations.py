"""Renews tests/durations.json, seconds by file, from JUnit reports:

pytest ... --junitxml=a.xml; python tests/durations.py a.xml b.xml
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_name("durations.json")


def seconds_by_file(reports: list[str]) -> dict[str, float]:
    """Files that take a second or more; the rest need no order."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            path = case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"
            seconds[path] += float(case.get("time", 0))
    return {path: round(spent, 1) for path, spent in sorted(seconds.items()) if spent >= 1}


if __name__ == "__main__":
    FILE.write_text(json.dumps(seconds_by_file(sys.argv[1:]), indent=0) + "\n", encoding="utf-8")
