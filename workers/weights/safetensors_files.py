"""The safetensors files of a Hugging Face folder: one, or several with an index.

Without torch, unless tensors are to be read: what can be found wrong with the files themselves is
found by whoever only looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from outrider.errors import ModelError
from outrider.workers.weights.files import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_INDEX_FILE = "stored.index.json"
LOOKING, READING = "np", "pt"  # as safetensors calls what it makes tensors for


class SafetensorsFiles:
    """Which file has which tensor. Raises `ModelError` if one is missing or damaged at its head.

    With `only`, the folder's other files are somebody else's.
    """

    def __init__(self, folder: Path, only: str | None = None, framework: str = LOOKING) -> None:
        self.folder = folder
        self._only = only
        self._framework = framework
        self._opened: dict[str, Any] = {}
        self.file_of = self._index()

    def stored_name(self, name: str) -> str:
        """Checkpoints saved from the bare model have no `model.` before their names."""
        for candidate in (name, name.removeprefix("model.")):
            if candidate in self.file_of:
                return candidate
        raise ModelError(
            f"{self.folder} has no tensor {name!r}; get the complete checkpoint again."
        )

    def _index(self) -> Mapping[str, str]:
        if self._only is not None:
            return dict.fromkeys(self.open(self._only).keys(), self._only)
        if (self.folder / SINGLE_FILE).is_file():
            return dict.fromkeys(self.open(SINGLE_FILE).keys(), SINGLE_FILE)
        if (self.folder / INDEX_FILE).is_file():
            return self._read_index()
        others = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if len(others) == 1:
            return dict.fromkeys(self.open(others[0]).keys(), others[0])
        raise ModelError(
            f"{self.folder} has no {SINGLE_FILE} and no {INDEX_FILE}; "
            "save the model with save_pretrained(..., safe_serialization=True)."
        )

    def _read_index(self) -> Mapping[str, str]:
        path = self.folder / INDEX_FILE
        file_of = read_json(path).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise ModelError(f"{path} has no weight_map; get the complete checkpoint again.")
        for file_name in sorted(set(file_of.values())):
            present = set(self.open(file_name).keys())
            for name, holder in file_of.items():
                if holder == file_name and name not in present:
                    raise ModelError(
                        f"{self.folder / file_name} has no tensor {name!r}, which {INDEX_FILE} "
                        "says it holds; get the complete checkpoint again."
                    )
        return file_of

    def open(self, file_name: str) -> Any:
        if file_name not in self._opened:
            path = self.folder / file_name
            if Path(file_name).name != file_name:
                raise ModelError(f"{INDEX_FILE} names {file_name!r}, which is not in its folder.")
            self._opened[file_name] = open_safetensors(path, self._framework)
        return self._opened[file_name]


class StoredFiles:
    """What a conversion of a GGUF file has kept of it as it was: the kind and the file of each
    tensor, and the files. There may be none."""

    def __init__(self, folder: Path, framework: str = LOOKING) -> None:
        self.kinds: dict[str, str] = {}
        self.file_of: dict[str, str] = {}
        path = folder / STORED_INDEX_FILE
        if path.is_file():
            index = read_json(path)
            try:
                self.kinds, self.file_of = index["kinds"], index["weight_map"]
            except KeyError as error:
                raise ModelError(f"{path} has no {error}; remove it.") from None
        self.opened = {
            name: open_safetensors(folder / name, framework) for name in set(self.file_of.values())
        }


def open_safetensors(path: Path, framework: str) -> Any:
    try:
        return safe_open(str(path), framework=framework)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; get the complete checkpoint again.") from None
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} is damaged or incomplete ({error}); download it again.")
