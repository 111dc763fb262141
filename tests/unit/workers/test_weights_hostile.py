"""Files that state what cannot be: refused in a sentence, before anything is made of them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import random_model
from gguf_files import close, gguf_name, header
from safetensors.torch import save_file

from outrider.errors import ModelError
from outrider.workers.models.source import WeightRequest
from outrider.workers.weights.gguf_config import hf_config
from outrider.workers.weights.gguf_convert import convert
from outrider.workers.weights.safetensors_files import StoredFiles
from outrider.workers.weights.safetensors_source import SafetensorsSource
from outrider.workers.weights.stored_source import StoredFolder

gguf = pytest.importorskip("gguf")

HEADER = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.context_length": 1024,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "num_tokens": 100,
}
Q = "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", 0),
        ("attention.head_count", "four"),
        ("attention.head_count", [4, 4]),
        ("attention.head_count_kv", 0),
        ("attention.key_length", 0),
        ("block_count", 0),
        ("block_count", 4_000_000_000),
        ("feed_forward_length", 128.0),
        ("context_length", 2**32 - 1),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("rope.freq_base", 0.0),
        ("expert_count", "two"),
    ],
)
def test_a_header_is_refused_by_the_name_it_has_there(key: str, value: Any) -> None:
    assert hf_config(HEADER, set(), None)["head_dim"] == 16
    with pytest.raises(ModelError, match=rf"^llama\.{key} is .*, and has to be a"):
        hf_config(HEADER | {f"llama.{key}": value}, set(), None)


def write_gguf(path: Path, **changes: np.ndarray) -> bytes:
    """A small llama with these tensors in place of its own, or beside them."""
    model = random_model("llama")
    writer = gguf.GGUFWriter(path, "llama")
    header(writer, model, "llama")
    tensors = {gguf_name(name): tensor.numpy() for name, tensor in model.state_dict().items()}
    for name, values in (tensors | changes).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    close(writer)
    return path.read_bytes()


@pytest.mark.parametrize("shape", [(64 * 64,), (7,), (4, 16, 64), (63, 64)])
def test_queries_of_another_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", **{Q: np.ones(shape, np.float32)})
    with pytest.raises(ModelError, match=r"q_proj\.weight has shape .* 4 heads of 16 rows"):
        convert(tmp_path / "model.gguf", tmp_path)


@pytest.mark.parametrize("divisors", [np.ones(3), np.ones((2, 4)), np.full(8, np.nan)])
def test_frequencies_that_fit_no_head_are_refused(divisors: np.ndarray, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", **{"rope_freqs.weight": divisors.astype(np.float32)})
    with pytest.raises(ModelError, match="rope divisor"):
        convert(tmp_path / "model.gguf", tmp_path)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (7, "not aligned"),
        (2**40, ""),  # told by the reader
        (2**64 - 32, "beyond the file"),
        (0, "begins within another"),
    ],
)
def test_a_tensor_in_a_wrong_place_is_refused(offset: int, message: str, tmp_path: Path) -> None:
    contents = bytearray(write_gguf(tmp_path / "model.gguf"))
    at = contents.rindex(Q.encode()) + len(Q) + 4 + 2 * 8 + 4
    contents[at : at + 8] = struct.pack("<Q", offset)
    (tmp_path / "model.gguf").write_bytes(contents)
    with pytest.raises(ModelError, match=rf"model\.gguf is damaged.*{message}.*download"):
        convert(tmp_path / "model.gguf", tmp_path)


def stored_folder(folder: Path, index: Any, dtype: torch.dtype = torch.uint8) -> Path:
    save_file({"w": torch.zeros(4, 34, dtype=dtype)}, folder / "stored-00001.safetensors")
    save_file({"w": torch.zeros(4, 32)}, folder / "model.safetensors")
    (folder / "stored.index.json").write_text(json.dumps(index))
    return folder


def find(folder: Path) -> None:
    source = SafetensorsSource(folder, torch.float32, torch.device("cpu"))
    StoredFolder(folder, source).find(WeightRequest("w", (4, 32)))


FILE = {"w": "stored-00001.safetensors"}
KIND = {"w": "Q8_0"}


@pytest.mark.parametrize(
    ("kinds", "file_of", "read", "message"),
    [
        ({"w": "Q9_9"}, FILE, find, "w is 'Q9_9', which is not supported"),
        ({"w": "INT8"}, FILE, find, "w is 'INT8', which is not supported"),
        ({"w": [1]}, FILE, StoredFiles, "no kinds of texts"),
        ([], {}, StoredFiles, "no kinds of texts"),
        (KIND, None, StoredFiles, "no weight_map of texts"),
        (KIND, ["w"], StoredFiles, "no weight_map of texts"),
        (KIND, {"w": 3}, StoredFiles, "no weight_map of texts"),
        (KIND, {}, StoredFiles, "do not list the same tensors"),
        (KIND | {"x": "Q8_0"}, FILE | {"x": FILE["w"]}, StoredFiles, "has no tensor 'x'"),
        (KIND, {"w": "../stored-00001.safetensors"}, StoredFiles, "not in its folder"),
        (KIND, {"w": ".."}, StoredFiles, "not in its folder"),
    ],
)
def test_an_index_of_stored_weights_is_not_trusted(
    kinds: Any, file_of: Any, read: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    folder = stored_folder(tmp_path, {"kinds": kinds, "weight_map": file_of})
    with pytest.raises(ModelError, match=message):
        read(folder)


def test_stored_weights_that_are_no_bytes_are_refused(tmp_path: Path) -> None:
    index = {"kinds": KIND, "weight_map": FILE}
    find(stored_folder(tmp_path, index))
    with pytest.raises(ModelError, match=r"bytes \(I8\)"):
        find(stored_folder(tmp_path, index, torch.int8))
