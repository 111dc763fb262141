"""Speed of quantized checkpoints of the bundled target on CPUs, beside its GGUF file.

    python -m outrider.benchmarks.quantized_speed

The checkpoints are made here, rounded to the nearest. Models take turns; a rate is tokens by the
CPU time of the process, with one thread, so other work on the machine counts little.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from outrider.engine.llm import LLM
from outrider.kernels.quantized import FP8_MAX
from outrider.scheduler.params import SamplingParams
from outrider.workers.weights.checkpoint import whole_folder
from outrider.workers.weights.safetensors_files import SafetensorsFiles

_MODEL = "smollm2-135m-instruct"
_PROMPT = "The history of the sea begins with"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def packed(weight: Tensor, bits: int, group_len: int) -> dict[str, Tensor]:
    """A linear's tensors in compressed-tensors' `pack-quantized`, without zero points."""
    largest, groups = 2 ** (bits - 1) - 1, weight.view(weight.shape[0], -1, group_len)
    scales = (groups.abs().amax(-1) / largest).half()
    numbers = (groups / scales.float()[..., None]).round().clamp(-largest - 1, largest)
    unsigned = (numbers.flatten(1) + largest + 1).to(torch.uint8)
    if bits == 4:
        unsigned = unsigned[:, ::2] | (unsigned[:, 1::2] << 4)
    return {
        "weight_packed": unsigned.contiguous().view(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def eight_bit_floats(weight: Tensor) -> dict[str, Tensor]:
    """A linear's tensors in `float-quantized`, with a scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / FP8_MAX
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def packed_group(target: str, bits: int, group_len: int) -> dict[str, Any]:
    numbers = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    weights = numbers | {"group_size": group_len}
    return {"targets": [target], "weights": weights, "format": "pack-quantized"}


def fp8_group() -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel"},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
        "format": "float-quantized",
    }


Make = Callable[[Tensor], dict[str, Tensor]]
_HEAD_GROUP = packed_group("lm_head", 8, 32)  # as in the GGUF file
FORMATS: Mapping[str, tuple[dict[str, Any], Make]] = {
    "W4A16, groups of 32": (packed_group("Linear", 4, 32), lambda weight: packed(weight, 4, 32)),
    "W4A16, groups of 64": (packed_group("Linear", 4, 64), lambda weight: packed(weight, 4, 64)),
    "W8A16, groups of 32": (packed_group("Linear", 8, 32), lambda weight: packed(weight, 8, 32)),
    "fp8, a scale for each output": (fp8_group(), eight_bit_floats),
}


def write(folder: Path, whole: Path, group: dict[str, Any], make: Make) -> None:
    """The bundled target with its layers in a format, and its head in 8 bits."""
    files = SafetensorsFiles(whole, framework="pt")
    tensors: dict[str, Tensor] = {}
    for name, file_name in files.file_of.items():
        tensor = files.open(file_name).get_tensor(name)
        if name.endswith("_proj.weight"):
            made = make(tensor)
            tensors |= {f"{name.removesuffix('weight')}{part}": made[part] for part in made}
        else:
            tensors[name] = tensor.bfloat16()
        if name == _EMBEDDING:
            made = packed(tensor, 8, 32)
            tensors |= {f"{_HEAD.removesuffix('weight')}{part}": made[part] for part in made}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    groups = {"layers": group, "head": _HEAD_GROUP}
    quantized = {"quant_method": "compressed-tensors", "config_groups": groups}
    config |= {"tie_word_embeddings": False, "quantization_config": quantized}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def tokens_per_s(llm: LLM, num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    began_s = time.process_time()
    llm.generate([_PROMPT], params)
    return num_tokens / (time.process_time() - began_s)


def main(
    rounds: Annotated[int, typer.Option(help="Rounds in which each model has a turn.")] = 7,
    tokens: Annotated[int, typer.Option(help="Tokens of a text.")] = 96,
) -> None:
    """Print the rates of all formats, and over that of the GGUF file."""
    options: dict[str, Any] = {
        **{"method": "off", "device": "cpu", "num_threads": 1, "kv_cache_gb": 0.05},
        **{"max_model_len": 256, "log_level": "error"},
    }
    with tempfile.TemporaryDirectory() as scratch:
        llms = {"the GGUF file": LLM(_MODEL, **options)}
        for number, (name, (group, make)) in enumerate(FORMATS.items()):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            write(folder, whole_folder(_MODEL), group, make)
            llms[name] = LLM(str(folder), tokenizer=_MODEL, **options)
        rates: dict[str, list[float]] = {name: [] for name in llms}
        for turn in range(rounds + 1):
            for name, llm in llms.items():
                rate = tokens_per_s(llm, tokens)
                if turn:  # the first one warms up
                    rates[name].append(rate)
    baseline, *_ = rates
    for name, found in rates.items():
        ratios = [rate / other for rate, other in zip(found, rates[baseline], strict=True)]
        typer.echo(f"{name:30} {statistics.median(found):6.1f} {statistics.median(ratios):6.2f}")


if __name__ == "__main__":
    typer.run(main)
