"""Prints the versions that pip would install, as constraints: see `make lock`.

pip install --dry-run --ignore-installed --report report.json ...
python docker/lock.py < report.json > requirements.lock
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

HEAD = """\
# Exact versions of what CI and the images install, as constraints: pip install -c requirements.lock
# Made by `make lock`.
"""
_OWN = "outrider"


def lock(report: dict[str, Any]) -> str:
    """Names and versions only: the index, and a build for a kind of machine (1.0+cpu), are the
    installer's choice."""
    found = {}
    for each in report["install"]:
        name = re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower()
        found[name] = each["metadata"]["version"].partition("+")[0]
    found.pop(_OWN, None)
    return HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


if __name__ == "__main__":
    sys.stdout.write(lock(json.load(sys.stdin)))
