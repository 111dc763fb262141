"""The safetensors files of a Hugging Face folder: one, or several with an index.

Opening them checks the files without importing torch; only reading tensors needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from outrider.checkpoints.files import read_json
from outrider.errors import ModelError
from outrider.workers.weights.dequantised import STORED_KINDS

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_INDEX_FILE = "stored.index.json"
LOOKING, READING = "np", "pt"  # safetensors frameworks
WHOLE = ("F64", "F32", "F16", "BF16")  # types that are not quantized, as safetensors names them


class SafetensorsFiles:
    """Maps tensors to files. Raises `ModelError` if a file is missing or has a damaged header.

    With `only`, the folder's other files are ignored.
    """

    def __init__(self, folder: Path, only: str | None = None, framework: str = LOOKING) -> None:
        self.folder = folder
        self._only = only
        self._framework = framework
        self._opened: dict[str, Any] = {}
        self.file_of = self._index()

    def stored_name(self, name: str) -> str:
        """The stored name of a tensor: checkpoints of the bare model omit the prefix `model.`."""
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
        file_of = _weight_map(path, read_json(path))
        if not file_of:
            raise ModelError(f"{path} has no weight_map; get the complete checkpoint again.")
        opened = {file_name: self.open(file_name) for file_name in sorted(set(file_of.values()))}
        _check_present(path, file_of, opened)
        return file_of

    def open(self, file_name: str) -> Any:
        if file_name not in self._opened:
            self._opened[file_name] = open_safetensors(self.folder / file_name, self._framework)
        return self._opened[file_name]


class StoredFiles:
    """The tensors that a GGUF conversion left as stored: the type and the file of each, and the
    opened files. Possibly empty; empty without a folder."""

    def __init__(self, folder: Path | None, framework: str = LOOKING) -> None:
        self.kinds: dict[str, str] = {}
        self.file_of: dict[str, str] = {}
        self.opened: dict[str, Any] = {}
        if folder is None:
            return
        path = folder / STORED_INDEX_FILE
        if path.is_file():
            index = read_json(path)
            self.kinds, self.file_of = _texts(path, index, "kinds"), _weight_map(path, index)
        self.opened = {
            name: open_safetensors(folder / name, framework) for name in set(self.file_of.values())
        }
        if self.kinds.keys() != self.file_of.keys():
            raise ModelError(
                f"kinds and weight_map of {path} do not list the same tensors; remove that folder."
            )
        _check_present(path, self.file_of, self.opened)
        for name, kind in self.kinds.items():
            if kind not in STORED_KINDS:
                raise ModelError(
                    f"{path} says that {name} is {kind!r}, which is not supported; remove that "
                    "folder."
                )


def _texts(path: Path, index: Mapping[str, Any], key: str) -> dict[str, str]:
    found = index.get(key)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ModelError(
            f"{path} has no {key} of texts by tensor; get the complete checkpoint again."
        )
    return found


def _weight_map(path: Path, index: Mapping[str, Any]) -> dict[str, str]:
    """The file of each tensor, checked to be in the folder of the index."""
    file_of = _texts(path, index, "weight_map")
    for file_name in file_of.values():
        if Path(file_name).name != file_name or file_name in ("", ".."):
            raise ModelError(f"{path.name} names {file_name!r}, which is not in its folder.")
    return file_of


def _check_present(path: Path, file_of: Mapping[str, str], opened: Mapping[str, Any]) -> None:
    names_in = {file_name: set(file.keys()) for file_name, file in opened.items()}
    for name, file_name in file_of.items():
        if name not in names_in[file_name]:
            raise ModelError(
                f"{path.parent / file_name} has no tensor {name!r}, which {path.name} says it "
                "holds; get the complete checkpoint again."
            )


def open_safetensors(path: Path, framework: str) -> Any:
    try:
        return safe_open(str(path), framework=framework)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; get the complete checkpoint again.") from None
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} is damaged or incomplete ({error}); download it again.")
