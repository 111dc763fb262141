"""Prints a software bill of materials as CycloneDX 1.6 JSON: what is installed, and its licences.

python docker/sbom.py python           distributions of the interpreter that runs it
python docker/sbom.py debian python    packages in dpkg's database as well
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path("/")
_CLASSIFIER = "License :: "
_LONGEST_NAME = 100  # some distributions have their whole licence in the field

Component = dict[str, Any]


def python_components() -> Iterator[Component]:
    for found in metadata.distributions(path=_folders()):
        name, version = found.metadata["Name"], found.version
        if name:  # leftovers of a removed distribution have none
            purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{quote(version)}"
            yield _component(name, version, purl, _python_licences(found.metadata))


def _folders() -> list[str]:
    """Where distributions are installed, also those vendored by others."""
    found = dict.fromkeys(path for path in sys.path if Path(path).is_dir())
    for path in [path for path in found if Path(path).name in ("site-packages", "dist-packages")]:
        found |= dict.fromkeys(str(each.parent) for each in Path(path).rglob("*.dist-info"))
    return list(found)


def _python_licences(described: Any) -> list[Component]:
    if expression := described.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in described.get_all("Classifier") or ()
        if line.startswith(_CLASSIFIER) and line != "License :: OSI Approved"
    ]
    licence = (described.get("License") or "").strip().partition("\n")[0]
    names = [licence] if 0 < len(licence) <= _LONGEST_NAME else classifiers
    return [{"license": {"name": name}} for name in names]


def debian_components(root: Path = ROOT) -> Iterator[Component]:
    distribution = _fields((root / "etc/os-release").read_text(), "=").get("ID", "debian")
    for paragraph in (root / "var/lib/dpkg/status").read_text().split("\n\n"):
        found = _fields(paragraph, ":")
        if found.get("Status", "").endswith(" installed"):
            name, version = found["Package"], found["Version"]
            purl = f"pkg:deb/{distribution}/{name}@{quote(version)}?arch={found['Architecture']}"
            yield _component(name, version, purl, _debian_licences(root, name))


def _debian_licences(root: Path, package: str) -> list[Component]:
    """From machine-readable copyright files; others are prose."""
    file = root / "usr/share/doc" / package / "copyright"
    if not file.is_file():
        return []
    text = file.read_text(errors="replace")
    if not text.startswith("Format:"):
        return []
    names = sorted(set(re.findall(r"(?m)^License: *(\S.*)$", text)))
    return [{"license": {"name": name.strip()}} for name in names]


def _fields(text: str, separator: str) -> dict[str, str]:
    pairs = (line.split(separator, 1) for line in text.splitlines() if separator in line[1:])
    return {key: value.strip().strip('"') for key, value in pairs if not key.startswith(" ")}


def _component(name: str, version: str, purl: str, licences: list[Component]) -> Component:
    found: Component = {"type": "library", "bom-ref": purl, "name": name}
    found |= {"version": version, "purl": purl}
    return found | ({"licenses": licences} if licences else {})


def document(components: Iterable[Component]) -> Component:
    """Depends on the components only, so that images are reproducible."""
    unique = {each["bom-ref"]: each for each in components}
    ordered = [unique[reference] for reference in sorted(unique)]
    digest = hashlib.sha256(json.dumps(ordered, sort_keys=True).encode()).hexdigest()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(digest[:32], version=5)}",
        "version": 1,
        "components": ordered,
    }


KINDS: Mapping[str, Callable[[], Iterator[Component]]] = {
    "python": python_components,
    "debian": debian_components,
}


def main(*kinds: str) -> None:
    if not kinds or not set(kinds) <= set(KINDS):
        sys.exit(f"usage: {Path(__file__).name} {'|'.join(KINDS)}...")
    print(json.dumps(document(chain.from_iterable(KINDS[kind]() for kind in kinds)), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
