"""The Hugging Face hub: resolves revisions to commits, and downloads files once per host."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.checkpoints.cache import cache_folder, locked
from outrider.checkpoints.files import Files
from outrider.errors import ModelError
from outrider.progress_stages import stage
from outrider.requirements import install_command

_TEXT = ["config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"]
_TEXT += ["tokenizer*.json", "vocab.*", "merges.txt", "*.model", "chat_template*", "*.jinja"]
_PATTERNS = {
    Files.TEXT: _TEXT,
    Files.ALL: ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"],
    Files.PICKLED: ["*.bin", "*.pt", "*.json"],
}
_DUPLICATES = ["consolidated*", "*/*"]  # the same weights in another layout
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REFUSED = (401, 403)
_NOT_FOUND = 404


def commit_of(model_id: str, revision: str | None) -> str:
    """The current commit of a branch, a tag or the newest revision; if the hub is unreachable, that
    of the last download."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    hub = _client(model_id)
    try:
        return str(hub.HfApi().repo_info(model_id, revision=revision).sha)
    # The hub's client raises its own, its HTTP library's and the system's errors alike.
    except Exception as error:
        if _status_of(error) in (*_REFUSED, _NOT_FOUND):
            raise _explained(model_id, revision, error) from None
        try:
            options = {"local_files_only": True, "allow_patterns": ["config.json"]}
            return Path(hub.snapshot_download(model_id, revision=revision, **options)).name
        except Exception:
            raise _explained(model_id, revision, error) from None


def download(model_id: str, revision: str | None, files: Files) -> Path:
    """Download the files; returns their folder in the hub's own cache. Of several processes on a
    host one downloads and the others wait."""
    hub = _client(model_id)
    name = f"{model_id.replace('/', '--')}-{files}"
    what = f"the download of {model_id}"
    with locked(cache_folder() / "locks" / name, what), stage(f"downloading {model_id}"):
        try:
            folder = hub.snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=_PATTERNS[files],
                ignore_patterns=_DUPLICATES,
            )
        except Exception as error:
            raise _explained(model_id, revision, error) from None
    return Path(folder)


def _client(model_id: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"downloading {model_id!r} needs the package huggingface_hub; install it with: "
            f"{install_command(['huggingface_hub'])}"
        ) from None
    return huggingface_hub


def _explained(model_id: str, revision: str | None, error: BaseException) -> ModelError:
    """The error with its remedy, in one sentence."""
    host, status = socket.gethostname(), _status_of(error)
    if status in _REFUSED:
        return ModelError(
            f"the hub refuses model {model_id!r} to host {host} ({status}); set HF_TOKEN or accept "
            f"the licence of {model_id} on its page, and check the name."
        )
    if any(type(each).__name__ == "RevisionNotFoundError" for each in _chain(error)):
        return ModelError(
            f"model {model_id!r} has no revision {revision!r} on the hub; name a branch, a tag or "
            "a commit of it."
        )
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return ModelError(
            f"model {model_id!r} is not a local folder, its files are not all in the hub's cache "
            f"on host {host}, and HF_HUB_OFFLINE is set; unset it, download the model there, or "
            "give the path of a local folder."
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"model {model_id!r} is not a local folder and the hub could not provide it to host {host} "
        f"({reason}); check the name and the network, or give the path of a local folder."
    )


def _status_of(error: BaseException) -> int | None:
    """The HTTP status of the hub's response that caused the error, if any."""
    answers = (getattr(each, "response", None) for each in _chain(error))
    return next((answer.status_code for answer in answers if answer is not None), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
