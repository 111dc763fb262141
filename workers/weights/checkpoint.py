"""Resolves a model's name to its folder and specification, without torch or reading weights.

A GGUF file is converted once into a folder in the cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from outrider.checkpoints.cache import (
    build_folder,
    cache_folder,
    discard_folder,
    read_own,
    write_own,
)
from outrider.checkpoints.files import Files, read_json
from outrider.checkpoints.resolve import resolve_source
from outrider.errors import ModelError
from outrider.progress_stages import stage
from outrider.workers.models.spec import ModelSpec, eos_ids
from outrider.workers.models.unsupported import refuse_adapter
from outrider.workers.weights.formats.registry import schemes_in
from outrider.workers.weights.safetensors_files import SafetensorsFiles, StoredFiles

logger = logging.getLogger(__name__)

FORMAT_VERSION = "3"  # part of the cache key: raise it when what a conversion writes changes
FINGERPRINT_DIGITS = 16


def load_spec(
    source: str | Path, *, revision: str | None = None, needed: Files = Files.ALL
) -> ModelSpec:
    """Sizes and variants of a model, without reading its weights. From a hub these are downloaded
    only if `needed`."""
    return spec_of(checkpoint_folder(source, revision, needed))


def check_files(source: str | Path, *, revision: str | None = None) -> None:
    """Raise `ModelError` if weight files are missing, truncated or have damaged headers; reads no
    weights."""
    SafetensorsFiles(checkpoint_folder(source, revision))


def checkpoint_folder(
    source: str | Path, revision: str | None = None, needed: Files = Files.ALL
) -> Path:
    """The Hugging Face folder behind a name; a GGUF is converted into one first."""
    path = resolve_source(source, revision, needed)
    return converted_folder(path) if _is_gguf(path) else path


def whole_folder(source: str | Path, revision: str | None = None) -> Path:
    """As `checkpoint_folder`, for other programs that read Hugging Face folders: all weights are
    float32, several times the size of a quantised GGUF."""
    path = resolve_source(source, revision)
    return converted_folder(path, whole=True) if _is_gguf(path) else path


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def converted_folder(path: Path, *, whole: bool = False) -> Path:
    """The folder with the contents of `path`, converted if necessary."""
    name = f"{path.stem}-{_fingerprint(path)}"
    folder = cache_folder() / "gguf" / (f"{name}-float32" if whole else name)
    if folder.is_dir():
        try:
            SafetensorsFiles(folder)
            StoredFiles(folder)
            return folder
        except ModelError as error:
            logger.warning("converting %s again: %s", path.name, error)
            discard_folder(folder)
    logger.info("converting %s into %s (once)", path.name, folder)
    from outrider.workers.weights.gguf_convert import convert  # NumPy

    try:
        with stage(f"converting {path.name} (once)"):
            build_folder(folder, lambda scratch: convert(path, scratch, whole=whole))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the conversion of {path.name} cannot be written to {folder.parent} ({error}); "
            "make room there or set OUTRIDER_CACHE to another folder."
        ) from None
    return folder


def _fingerprint(path: Path) -> str:
    """A hash of the file's contents, so that a reinstalled copy keeps its conversion. It is cached
    until the file is modified, since reading a large file takes a while."""
    status = path.stat()
    identity = (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    key = hashlib.sha256(repr((FORMAT_VERSION, identity)).encode()).hexdigest()
    cached = cache_folder() / "fingerprints" / key[:FINGERPRINT_DIGITS]
    with suppress(OSError, ValueError):
        known = read_own(cached)
        if len(known) == FINGERPRINT_DIGITS and int(known, 16) >= 0:
            return known
    with path.open("rb") as file, stage(f"reading {path.name} for its fingerprint"):
        digest = hashlib.file_digest(file, "sha256")
    digest.update(FORMAT_VERSION.encode())
    fingerprint = digest.hexdigest()[:FINGERPRINT_DIGITS]
    with suppress(OSError):  # then it is computed again
        write_own(cached, fingerprint)
    return fingerprint


def spec_of(folder: Path) -> ModelSpec:
    """The specification of a folder; generation_config.json overrides the EOS ids."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not (folder / "config.json").exists():
        refuse_adapter(str(folder), read_json(adapter))
    spec = ModelSpec.from_hf(read_json(folder / "config.json"))
    schemes_in(folder)
    generation = folder / "generation_config.json"
    ending = eos_ids(read_json(generation)) if generation.is_file() else ()
    return dataclasses.replace(spec, eos_ids=ending) if ending else spec
