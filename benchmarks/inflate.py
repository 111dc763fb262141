"""Enlarges a Llama checkpoint to the shape of another model without changing its function.

    python -m outrider.benchmarks.inflate smollm2-135m-instruct llama-3.1-8b OUT --dtype bfloat16

A benchmark on the result has the acceptance of a real pair of models at the cost of larger ones.

New hidden dimensions stay zero in the residual stream, because the new entries of the embedding,
`o_proj` and `down_proj` are zero. All other new entries are random, so they cost what they cost in
any model. Scaling undoes the effect of the new sizes: RMS norms divide by the root of a mean over
more dimensions, attention by the root of the head's size. A rotary frequency depends on its pair's
share of the head, so pairs move apart as a head widens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from outrider.benchmarks.inflate_recipes import SHAPES, Recipe, Shape, inflate_spec, recipes_of
from outrider.checkpoints.cache import build_folder
from outrider.checkpoints.files import read_json
from outrider.checkpoints.resolve import BUNDLED_TARGET, draft_assets, resolve_source
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.kernels.types import Ops
from outrider.text.tokenizer import TOKENIZER_FILES
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.names import LLAMA
from outrider.workers.models.shard import Shard
from outrider.workers.models.source import WeightSource
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.checkpoint import checkpoint_folder, load_spec
from outrider.workers.weights.safetensors_files import INDEX_FILE
from outrider.workers.weights.safetensors_source import SafetensorsSource

RANDOM_STD = 0.02
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENIZER_PATTERNS = (
    *("tokenizer*", "vocab.json", "merges.txt", "chat_template*"),
    *("special_tokens_map.json", "added_tokens.json"),
)
Value = TypeVar("Value")
app = typer.Typer(add_completion=False)


class InflatedTensors:
    """A `WeightSource` of an enlarged checkpoint, made tensor by tensor from the small one's.

    A tensor's random part depends on seed, name, dtype and device type; a rank makes the whole
    tensor and keeps its slice. `small` should read float32: scaled weights are rounded once.
    """

    def __init__(
        self, small: WeightSource, recipes: Mapping[str, Recipe], dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.dtype = dtype
        self.device = small.device
        self._small = small
        self._seed = seed
        self._recipes = recipes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the enlarged checkpoint."""
        return {name: recipe.shape for name, recipe in self._recipes.items()}

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        recipe = self._recipes.get(name)
        if recipe is None or recipe.shape != shape:
            known = "is not in it" if recipe is None else f"has shape {list(recipe.shape)}"
            raise ModelError(f"an enlarged model has no {name} of shape {list(shape)}: {known}.")
        whole = self._whole(name, recipe)
        if rows is None and columns is None:
            return whole
        cuts = [
            slice(part.start, part.stop) if part is not None else slice(None)
            for part in (rows, columns)[: len(shape)]
        ]
        # A copy: a view would keep the whole tensor in memory.
        return whole[tuple(cuts)].clone()

    def _whole(self, name: str, recipe: Recipe) -> Tensor:
        tensor = self._filled(name, recipe)
        if recipe.old_name is None:
            return tensor
        places = [axis.places.to(self.device) for axis in recipe.axes]
        if recipe.cleared is not None:
            tensor[_grid([recipe.cleared.to(self.device), *places[1:]])] = 0
        old = self._small.read(recipe.old_name, tuple(map(len, places)))
        tensor[_grid(places)] = (old * recipe.scale).to(self.dtype)
        return tensor

    def _filled(self, name: str, recipe: Recipe) -> Tensor:
        if recipe.fill == "zero":
            return torch.zeros(recipe.shape, dtype=self.dtype, device=self.device)
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest))
        tensor = torch.empty(recipe.shape, dtype=self.dtype, device=self.device)
        # Norms near 1, as trained ones are, keep activations in new layers at the usual scale.
        mean = 1.0 if recipe.fill == "norm" else 0.0
        return tensor.normal_(mean, RANDOM_STD, generator=generator)


class InflatedSource(InflatedTensors):
    """The tensors of an enlarged model, and its `spec`."""

    def __init__(
        self, small: WeightSource, spec: ModelSpec, shape: Shape, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.spec = inflate_spec(spec, shape)
        super().__init__(small, recipes_of(spec, self.spec), dtype, seed)


def _grid(places: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """An index of every combination of rows and columns, or of rows alone."""
    return (places[0],) if len(places) == 1 else (places[0][:, None], places[1])


def load_inflated(
    model: str | Path,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: Ops,
    shard: Shard | None = None,
    max_position: int | None = None,
    seed: int = 0,
    quantization: str | None = None,
) -> Decoder:
    """`load_model` of the enlarged model, which is made on `device`."""
    weights = open_inflated(checkpoint_folder(model), shape, dtype, device, seed)
    spec = weights.spec if max_position is None else weights.spec.with_max_position(max_position)
    return Decoder(spec, weights, ops, shard, quantization)


def open_inflated(
    folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device | str, seed: int
) -> InflatedSource:
    small = SafetensorsSource(folder, torch.float32, torch.device(device))
    return InflatedSource(small, load_spec(folder), shape, dtype, seed)


def save_inflated(
    model: str | Path,
    shape: Shape,
    out_dir: Path,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Write the enlarged model as a Hugging Face folder, one file a layer, with its tokenizer."""
    if out_dir.exists():
        raise ConfigError(f"{out_dir} exists already; name a new folder.")
    folder = checkpoint_folder(model)
    source = open_inflated(folder, shape, dtype, device, seed)
    config = _config(read_json(folder / "config.json"), source.spec, dtype)
    copied = [*_tokenizer_files(model), *folder.glob("generation_config.json")]

    def build(scratch: Path) -> None:
        _write_weights(source, scratch)
        (scratch / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        for path in copied:
            shutil.copy(path, scratch)

    build_folder(out_dir, build)


def _config(config: dict[str, Any], spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key != "torch_dtype"}
    return kept | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _tokenizer_files(model: str | Path) -> list[Path]:
    path = draft_assets() if model == BUNDLED_TARGET else resolve_source(model)
    folder = path if path.is_dir() else path.parent
    found = sorted({path for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern)})
    if not any(path.name in TOKENIZER_FILES for path in found):
        raise ModelError(f"{folder} has no tokenizer; copy the original model's files into it.")
    return found


def _write_weights(source: InflatedSource, folder: Path) -> None:
    shapes = source.shapes
    files = [list(names) for _, names in itertools.groupby(shapes, _layer_of)]
    file_of: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(files, 1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: source.read(name, shapes[name]) for name in names}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file_name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _layer_of(name: str) -> str:
    """The layer's number in the name; empty for tensors outside layers."""
    prefix = f"{LLAMA.layers}."
    return name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="Bundled name, folder, GGUF or hub id.")],
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    layers: Annotated[int | None, typer.Option(help="Layers, other than the shape's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    device: Annotated[str, typer.Option(help="A GPU makes other random weights, sooner.")] = "cpu",
) -> None:
    """Write a checkpoint of another shape that computes what MODEL computes."""
    try:
        chosen = _named(SHAPES, "shape", shape)
        if layers is not None:
            chosen = dataclasses.replace(chosen, num_layers=layers)
        save_inflated(model, chosen, out, _named(DTYPES, "dtype", dtype), seed, device)
    except OutriderError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


def _named(known: Mapping[str, Value], kind: str, name: str) -> Value:
    if name not in known:
        raise ConfigError(f"{kind} {name!r} is unknown; choose from {', '.join(known)}.")
    return known[name]


if __name__ == "__main__":
    app()
