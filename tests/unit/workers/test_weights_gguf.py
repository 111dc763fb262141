"""GGUF files: every quantisation and architecture, the conversion cache, damaged files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from c_kernels import with_kernels
from checkpoints import RaggedRun, random_model, random_prompt, reference_logits
from gguf_files import close, gguf_name, header, interleave
from safetensors import SafetensorError
from safetensors.torch import load_file

from outrider.checkpoints.files import read_json
from outrider.checkpoints.gguf_header import read_gguf_header
from outrider.errors import ModelError
from outrider.kernels.ops import select_ops
from outrider.text.tokenizer import load_tokenizer
from outrider.workers.models.rope import inverse_frequencies
from outrider.workers.models.rope_spec import RopeSpec
from outrider.workers.weights import gguf_convert
from outrider.workers.weights.checkpoint import _fingerprint, converted_folder, load_spec
from outrider.workers.weights.gguf_convert import MAX_FILE_BYTES
from outrider.workers.weights.loader import load_model
from outrider.workers.weights.safetensors_files import SafetensorsFiles
from outrider.workers.weights.safetensors_source import SafetensorsSource

gguf = pytest.importorskip("gguf")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OUTRIDER_CACHE", with_kernels(tmp_path / "cache"))
    yield tmp_path / "cache"


def write_gguf(path: Path, model: Any, architecture: str, extra: Any = None) -> None:
    """`model` as float32 GGUF; `extra(writer)` may add to it."""
    writer = gguf.GGUFWriter(path, architecture)
    header(writer, model, architecture)
    if extra is not None:
        extra(writer)
    heads = {
        "q_proj": model.config.num_attention_heads,
        "k_proj": model.config.num_key_value_heads,
    }
    is_interleaved = architecture in ("llama", "granite")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values, module = tensor.numpy(), name.rsplit(".", 2)[-2]
        if is_interleaved and module in heads:
            values = interleave(values, heads[module])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    close(writer)


def assert_same_logits(path: Path, model: Any) -> None:
    ops = select_ops(CPU, torch.float32)
    decoder = load_model(path, dtype=torch.float32, device="cpu", ops=ops)
    prompt = random_prompt(60)
    ours = RaggedRun(decoder, [prompt]).run(chunk=16)[0]
    torch.testing.assert_close(ours, reference_logits(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.model
@pytest.mark.parametrize(
    ("variant", "architecture"),
    [
        ("llama", "llama"),
        ("llama-tied", "llama"),
        ("llama-biases", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("granite", "granite"),
    ],
)
def test_each_architecture_gives_the_logits_of_transformers(
    variant: str, architecture: str, tmp_path: Path
) -> None:
    model = random_model(variant)
    write_gguf(tmp_path / "model.gguf", model, architecture)
    assert_same_logits(tmp_path / "model.gguf", model)


@pytest.mark.model
def test_llama3_scaling_arrives_as_divisors(tmp_path: Path) -> None:
    model = random_model("llama-llama3")
    head_dim = model.config.head_dim
    rope = RopeSpec.from_hf(model.config.to_dict())
    scaled = inverse_frequencies(rope, head_dim, 1024)
    divisors = (inverse_frequencies(RopeSpec(), head_dim, 1024) / scaled).numpy()
    write_gguf(
        tmp_path / "model.gguf",
        model,
        "llama",
        lambda writer: writer.add_tensor("rope_freqs.weight", divisors),
    )
    assert_same_logits(tmp_path / "model.gguf", model)


@pytest.mark.model
def test_yarn_scaling_is_read_from_the_header(tmp_path: Path) -> None:
    def add_scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(256)

    model = random_model("llama-yarn")
    write_gguf(tmp_path / "model.gguf", model, "llama", add_scaling)
    assert_same_logits(tmp_path / "model.gguf", model)


def test_a_conversion_on_a_full_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama")
    monkeypatch.setattr(gguf_convert, "save_file", no_space)
    with pytest.raises(ModelError, match="No space left on device.*make room there or set"):
        converted_folder(tmp_path / "model.gguf")


def crafted_blocks(kind: Any, num_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Raw blocks of 256 values each; only the float16 scales must not be arbitrary bytes."""
    scale = np.full((num_rows, 1), 0.01, dtype=np.float16).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.Q4_K:
        body = rng.integers(0, 256, (num_rows, 140), dtype=np.uint8)
        return np.concatenate([scale, scale, body], axis=1)
    body = rng.integers(0, 256, (num_rows, 208), dtype=np.uint8)
    return np.concatenate([body, scale], axis=1)


@pytest.mark.model
@pytest.mark.parametrize(
    "name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"]
)
def test_each_quantisation_is_read_as_the_reference_dequantiser_reads_it(
    name: str, tmp_path: Path
) -> None:
    kind = gguf.GGMLQuantizationType[name]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    model = random_model("llama", **sizes)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    header(writer, model, "llama")
    rng = np.random.default_rng(0)
    expected = {}
    for tensor_name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(tensor_name), values)
            continue
        if name in ("Q4_K", "Q6_K"):
            raw = crafted_blocks(kind, values.shape[0], rng)
        else:
            raw = gguf.quants.quantize(values, kind)
        expected[tensor_name] = gguf.quants.dequantize(raw, kind)
        writer.add_tensor(gguf_name(tensor_name), raw, raw_dtype=kind)
    close(writer)

    folder = converted_folder(tmp_path / "model.gguf")
    source = SafetensorsSource(folder, torch.float32, CPU)
    heads = {"q_proj": 4, "k_proj": 2}
    for tensor_name, values in expected.items():
        found = source.read(tensor_name, values.shape).numpy()
        module = tensor_name.rsplit(".", 2)[-2]
        if module in heads:
            found = interleave(found, heads[module])
        np.testing.assert_array_equal(found, values)


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(path, random_model("llama"), "llama")
    return path


@pytest.mark.model
def test_a_conversion_is_reused(small_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_spec(small_gguf)
    monkeypatch.setattr(gguf_convert, "convert", pytest.fail)
    assert load_spec(small_gguf) == first


@pytest.mark.model
def test_a_header_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_token_list(["a", "ü", "<s>"])
        writer.add_token_scores([0.5, 1.5, 2.5])
        writer.add_bos_token_id(2)
        writer.add_tags(["one", "two"])
        writer.add_bool("llama.some", True)
        writer.add_array("llama.numbers", [1, 2, 3])

    path = tmp_path / "model.gguf"
    write_gguf(path, random_model("llama"), "llama", extra)
    found, expected = read_gguf_header(path), gguf.GGUFReader(path)
    whole = {name: field.contents() for name, field in expected.fields.items()}
    arrays = {"tokenizer.ggml.tokens": 3, "tokenizer.ggml.scores": 3}
    assert found.array_lens == arrays
    assert found.fields == {
        name: value
        for name, value in whole.items()
        if name not in arrays and not name.startswith("GGUF.")
    }
    assert (found.alignment, found.data_start) == (expected.alignment, expected.data_offset)
    assert [
        (each.name, each.kind, [*reversed(each.shape)], found.data_start + each.offset)
        for each in found.tensors
    ] == [
        (each.name, int(each.tensor_type), each.shape.tolist(), int(each.data_offset))
        for each in expected.tensors
    ]


@pytest.mark.model
def test_a_conversion_holds_each_weight_once_and_as_it_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = random_model("llama")
    writer = gguf.GGUFWriter(path, "llama")
    header(writer, model, "llama")
    for name, tensor in model.state_dict().items():
        kind = gguf.GGMLQuantizationType["Q4_1" if tensor.ndim > 1 else "F32"]
        writer.add_tensor(
            gguf_name(name), gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind
        )
    close(writer)
    folder, whole = converted_folder(path), converted_folder(path, whole=True)
    names = {
        kind: [name for file in folder.glob(f"{kind}-*.safetensors") for name in load_file(file)]
        for kind in ("model", "stored")
    }
    assert {name for name in names["model"] if "norm" not in name} == set()
    assert sorted([*names["model"], *names["stored"]]) == sorted(model.state_dict())
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert num_bytes < 1.3 * path.stat().st_size
    source = SafetensorsSource(folder, torch.float32, CPU)
    floats = SafetensorsSource(whole, torch.float32, CPU)
    for name, tensor in model.state_dict().items():
        rows, shape = range(1, 3), tuple(tensor.shape)
        columns = range(2, 5) if tensor.ndim > 1 else None
        cut = source.read(name, shape, rows=rows, columns=columns)
        assert torch.equal(cut, floats.read(name, shape, rows=rows, columns=columns))


def test_a_conversion_needs_no_torch(small_gguf: Path) -> None:
    script = "import sys; from outrider.workers.weights.checkpoint import load_spec; "
    script += "load_spec(sys.argv[1]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", script, str(small_gguf)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.model
def test_a_touched_copy_keeps_its_conversion_and_a_changed_one_does_not(small_gguf: Path) -> None:
    folder = converted_folder(small_gguf)
    os.utime(small_gguf, (1, 1))
    assert converted_folder(small_gguf) == folder
    contents = bytearray(small_gguf.read_bytes())
    contents[-1] ^= 1
    small_gguf.write_bytes(contents)
    assert converted_folder(small_gguf) != folder


def test_every_byte_of_a_large_file_counts_whatever_its_times_say(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(bytes(4 << 20))
    found = path.stat()
    fingerprints = {_fingerprint(path)}
    for offset in range(0, 4 << 20, (1 << 18) + 12_345):
        contents = bytearray(4 << 20)
        contents[offset] = 1
        path.write_bytes(contents)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        before = len(fingerprints)
        fingerprints.add(_fingerprint(path))
        assert len(fingerprints) == before + 1, offset
        assert _fingerprint(path) in fingerprints, "as it was kept"


@pytest.mark.model
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_conversion_is_made_again(small_gguf: Path, damage: str) -> None:
    folder = converted_folder(small_gguf)
    weights = folder / "model-00001.safetensors"
    whole = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(whole[:-100])
    else:
        weights.unlink()
    assert converted_folder(small_gguf) == folder
    assert weights.read_bytes() == whole


@pytest.mark.model
def test_a_failed_conversion_leaves_nothing_behind(
    small_gguf: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("outrider.workers.weights.gguf_convert.save_file", fail)
    with pytest.raises(ModelError, match=r"no space left.*OUTRIDER_CACHE"):
        converted_folder(small_gguf)
    assert list((own_cache / "gguf").iterdir()) == []


@pytest.mark.model
def test_what_a_killed_conversion_left_is_removed(small_gguf: Path, own_cache: Path) -> None:
    folder = converted_folder(small_gguf)
    abandoned, recent = (folder.with_name(f".{folder.name}.{end}") for end in ("old", "new"))
    for leftover in (abandoned, recent):
        leftover.mkdir()
    os.utime(abandoned, (1, 1))
    (folder / "model-00001.safetensors").unlink()
    converted_folder(small_gguf)
    assert recent.is_dir()
    assert not abandoned.exists()


@pytest.mark.model
def test_a_large_conversion_is_split_into_files(
    small_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_FILE_BYTES >= 1 << 28
    monkeypatch.setattr("outrider.workers.weights.gguf_convert.MAX_FILE_BYTES", 50_000)
    folder = converted_folder(small_gguf)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert_same_logits(small_gguf, random_model("llama"))


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -64])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    write_gguf(path, random_model("llama"), "llama")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"cut\.gguf is damaged or not a GGUF file.*download"):
        load_spec(path)


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def array(kind: int, count: int) -> bytes:
    return text(b"a") + struct.pack("<IIQ", 9, kind, count)


HUGE = 1 << 40
TENSOR_TYPE_AND_OFFSET = bytes(12)
ANNOUNCING_TOO_MUCH = {
    "numbers": (0, 1, array(0, HUGE), f"announces {HUGE} array items"),
    "texts": (0, 1, array(8, HUGE), f"announces {HUGE} array items"),
    "more items than memory": (0, 1, array(0, 1 << 22) + bytes(1 << 22), "more than 2097152 items"),
    "a long text": (0, 1, text(b"a") + struct.pack("<IQ", 8, HUGE), "beyond its end"),
    "a long name": (0, 1, struct.pack("<Q", HUGE) + bytes(64), "beyond its end"),
    "fields": (0, HUGE, b"", f"announces {HUGE} fields"),
    "tensors": (HUGE, 0, b"", f"announces {HUGE} tensors"),
    "nested arrays": (0, 1, array(9, 1) + 9 * struct.pack("<IQ", 9, 1), "nested more than 4 deep"),
    "dimensions": (1, 0, text(b"t") + struct.pack("<I", 1 << 30) + bytes(64), "dimensions"),
    "values": (
        1,
        0,
        text(b"t") + struct.pack("<I2Q", 2, 1 << 32, 1 << 32) + TENSOR_TYPE_AND_OFFSET,
        f"a tensor of {1 << 64} values",
    ),
    "an unknown type": (0, 1, text(b"a") + struct.pack("<I", 77) + bytes(8), "unknown type 77"),
}


@pytest.mark.parametrize("what", ANNOUNCING_TOO_MUCH)
@pytest.mark.parametrize("load", [load_spec, load_tokenizer], ids=["weights", "tokenizer"])
def test_a_header_is_believed_only_as_far_as_the_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, load: Any
) -> None:
    num_tensors, num_fields, rest, reason = ANNOUNCING_TOO_MUCH[what]
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + rest)
    monkeypatch.setattr(gguf, "GGUFReader", pytest.fail)  # it would believe all of it
    with pytest.raises(ModelError, match=f"huge.gguf is damaged .*{reason}.*; download it again"):
        load(path)


def test_a_safetensors_header_is_believed_only_as_far_as_the_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", HUGE) + b"{}")
    with pytest.raises(ModelError, match="model.safetensors is damaged or incomplete"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_file_that_is_read_whole_has_a_limit(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with (tmp_path / name).open("wb") as file:
        file.truncate(HUGE)
    load = read_json if name == "config.json" else lambda path: load_tokenizer(path.parent)
    with pytest.raises(ModelError, match=rf"{name} has {HUGE} bytes, .* at most 268435456"):
        load(tmp_path / name)


def test_json_nested_beyond_measure_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_json(tmp_path / "config.json")


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_spec(path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model("llama"), "mamba")
    with pytest.raises(ModelError, match="'mamba'.*known are granite, llama, qwen2, qwen3"):
        load_spec(path)


def test_experts_in_a_gguf_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "experts.gguf"
    write_gguf(path, random_model("llama"), "llama", lambda writer: writer.add_expert_count(8))
    with pytest.raises(ModelError, match="a mixture of 8 experts, which is not supported"):
        load_spec(path)


def test_an_unknown_quantisation_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    header(writer, random_model("llama"), "llama")
    raw = np.zeros((4, 84), dtype=np.uint8)
    writer.add_tensor("output.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    close(writer)
    with pytest.raises(ModelError, match="Q2_K, which is not supported; known are F32"):
        load_spec(path)


def test_a_header_without_sizes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", np.zeros((4, 4), dtype=np.float32))
    close(writer)
    with pytest.raises(ModelError, match=r"lacks 'llama\.attention\.head_count'"):
        load_spec(path)
