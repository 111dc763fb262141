"""This package's dependencies, and the command that installs them for this interpreter.

The command lists the requirements themselves: an extra works only where an index, or the folder,
has this package.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from outrider.errors import ConfigError

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_EXTRA = re.compile(r"""\s*(?:and\s+)?extra\s*==\s*['"](?P<name>[\w-]+)['"]\s*""")
# Modules whose names differ from their distributions'.
_DISTRIBUTIONS = {
    "yaml": "PyYAML",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "google": "protobuf",
    "prometheus_client": "prometheus-client",
}


@cache
def requirements(extra: str | None = None) -> tuple[str, ...]:
    """The requirements of `pyproject.toml`: those of every installation, or those of an extra."""
    found = []
    for line in _declared():
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        own = _EXTRA.search(marker)
        if (None if own is None else own["name"]) == extra:
            marker = _EXTRA.sub("", marker)
            found.append(f"{requirement}; {marker}" if marker else requirement)
    return tuple(found)


def _declared() -> list[str]:
    """With the extra as a marker. An uninstalled checkout reads its own `pyproject.toml`."""
    try:
        return metadata.requires("outrider") or []
    except metadata.PackageNotFoundError:
        pass
    import tomllib

    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    declared: list[str] = list(project["dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        declared += [f"{line}; extra == {extra!r}" for line in lines]
    return declared


def name_of(requirement: str) -> str:
    """The distribution's name."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]


def install_command(packages: Iterable[str], *options: str) -> str:
    """A shell command."""
    python = os.path.relpath(sys.executable)
    python = sys.executable if python.startswith(os.pardir) else python
    installer = f"{python} -m pip install"
    if find_spec("pip") is None:  # as in environments of uv, and in our images
        installer = f"pip --python {python} install"
        if shutil.which("uv"):
            installer = f"uv pip install --python {python}"
    return " ".join([installer, *options, *map(shlex.quote, packages)])


def how_to_get(module: str) -> str | None:
    """The command that installs a missing module and the other missing requirements of its extra;
    None if this package does not need it."""
    name = _DISTRIBUTIONS.get(module, module).lower()
    for extra in (None, "bench", "deploy", "clients", "browser"):
        declared = requirements(extra)
        if name in {name_of(each).lower() for each in declared}:
            missing = [each for each in declared if not _is_installed(name_of(each))]
            own = [each for each in declared if name_of(each).lower() == name]
            return install_command(dict.fromkeys([*own, *missing]))
    return None


def need(*modules: str) -> None:
    """Raises `ConfigError` with the command that installs what is missing."""
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(_sentence(module, how_to_get(module)))


def not_installed(error: ModuleNotFoundError) -> str | None:
    """The same sentence for a failed import; None if no requirement provides the module."""
    module = (error.name or "").partition(".")[0]
    command = how_to_get(module) if module and find_spec(module) is None else None
    return None if command is None else _sentence(module, command)


def _sentence(module: str, command: str | None) -> str:
    return f"the package {module} is not installed; install it with: {command}"


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
