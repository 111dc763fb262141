"""Students: public key names, and trained as they are served."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from checkpoints import random_model
from distill_tools import NUM_LAYERS, VOCAB_SIZE, save_toy_target
from head_tools import HeadRun, load
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import ConfigError
from outrider.train.packing import make_batch
from outrider.train.progress import ProgressReporter
from outrider.train.settings import (
    DraftSizes,
    Eagle3Sizes,
    MedusaSizes,
    MlpSizes,
    TrainSettings,
)
from outrider.train.shards import TrainingRecord
from outrider.train.students.base import Student
from outrider.train.students.draft import DraftStudent, principal_components
from outrider.train.students.eagle3 import (
    Eagle3Student,
    chosen_layers,
    draft_tokens,
    feature_layers,
)
from outrider.train.students.make import check_fits, make_student
from outrider.train.students.medusa import MedusaStudent
from outrider.train.students.mlp import MlpStudent
from outrider.train.teacher import Teacher
from outrider.train.trainer import Trainer
from outrider.workers.weights.checkpoint import load_spec

pytestmark = pytest.mark.model
CPU = torch.device("cpu")
CONTEXT, DEPTH = 32, 3
COUNTS = np.arange(VOCAB_SIZE)[::-1].copy()
PROMPT = [1, 3, 10, 20, 30, 11, 21]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_toy_target(folder)
    return folder


def make(name: str, target: Path) -> tuple[Student, Teacher]:
    torch.manual_seed(2)
    layers = chosen_layers(NUM_LAYERS) if name.startswith("eagle3") else ()
    teacher = Teacher(str(target), CPU, layers)
    makers: dict[str, Callable[[], Student]] = {
        "draft": lambda: DraftStudent(DraftSizes(layers=2, width=32, heads=2), teacher, CONTEXT),
        "eagle3": lambda: Eagle3Student(
            Eagle3Sizes(draft_vocab=25, unroll=DEPTH), teacher, CONTEXT, COUNTS
        ),
        "eagle3-whole": lambda: Eagle3Student(
            Eagle3Sizes(draft_vocab=VOCAB_SIZE, unroll=DEPTH), teacher, CONTEXT, COUNTS
        ),
        "eagle3-deep": lambda: Eagle3Student(
            Eagle3Sizes(draft_vocab=25, layers=3, unroll=DEPTH), teacher, CONTEXT, COUNTS
        ),
        "medusa": lambda: MedusaStudent(MedusaSizes(heads=DEPTH, layers=2), teacher, "toy"),
        "mlp": lambda: MlpStudent(MlpSizes(predict=DEPTH, inner=24, tied=False), teacher),
        "mlp-tied": lambda: MlpStudent(MlpSizes(predict=DEPTH, scale_input=False), teacher),
    }
    student = makers[name]()
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.ndim == 1 or not parameter.any():  # what begins at 0 or 1 hides mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
            parameter.copy_(parameter.to(torch.bfloat16))  # as it is saved
    return student, teacher


LAYER = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PARTS = (*LAYER, *ATTENTION, "mlp.down_proj")
EAGLE3 = {"fc.weight", "norm.weight", "lm_head.weight", "midlayer.hidden_norm.weight"} | {
    f"midlayer.{part}.weight" for part in PARTS
}
PUBLIC_NAMES = {
    "draft": {"model.embed_tokens.weight", "model.norm.weight"}
    | {f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in PARTS},
    "eagle3": EAGLE3 | {"d2t", "t2d"},
    "eagle3-whole": EAGLE3,
    "eagle3-deep": EAGLE3
    | {"d2t", "t2d"}
    | {f"layers.{layer}.{part}.weight" for layer in (1, 2) for part in PARTS},
    "medusa": {
        f"{head}.{layer}.linear.{kind}"
        for head in range(DEPTH)
        for layer in range(2)
        for kind in ("weight", "bias")
    }
    | {f"{head}.2.weight" for head in range(DEPTH)},
    "mlp": {
        f"speculator.{part}.{level}.{kind}"
        for level in range(DEPTH)
        for part in ("emb", "proj", "head", "ln")
        for kind in ("weight", "bias")
        if kind == "weight" or part == "ln"
    },
}


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_a_checkpoint_has_exactly_the_public_names(name: str, target: Path, tmp_path: Path) -> None:
    student, _ = make(name, target)
    student.save(tmp_path)
    with safe_open(tmp_path / student.weights_file, "pt") as file:
        assert set(file.keys()) == PUBLIC_NAMES[name]


def guessed(student: Student, teacher: Teacher, ids: list[int], place: int) -> Tensor:
    """Logits of every level at a place of a text, by the target's ids."""
    batch = make_batch([[TrainingRecord(np.array(ids), 1, 0)]], CONTEXT, 1.0)
    with torch.no_grad():
        found = student.draft_outputs(batch, teacher.states(batch))
    logits = torch.stack(
        [
            state[place] @ found.lm_heads[which].T
            for state, which in zip(found.states, found.lm_head_of, strict=True)
        ]
    )
    if found.vocabulary is None:
        return logits
    whole = torch.full((len(logits), VOCAB_SIZE), -torch.inf)
    whole[:, found.vocabulary] = logits
    return whole


@pytest.mark.parametrize(
    "name", ["eagle3", "eagle3-whole", "eagle3-deep", "medusa", "mlp", "mlp-tied"]
)
def test_a_head_guesses_in_training_what_it_proposes_when_it_is_served(
    name: str, target: Path, tmp_path: Path
) -> None:
    student, teacher = make(name, target)
    student.save(tmp_path)
    head = load(tmp_path, teacher.spec, target, "torch")
    batch = make_batch([[TrainingRecord(np.array(PROMPT), 1, 0)]], CONTEXT, 1.0)
    seen = teacher.states(batch)
    features = seen.features if head.spec.layers else seen.hidden
    assert features is not None
    slots = len(PROMPT) - 1
    run = HeadRun(head, 1, CONTEXT)
    [served] = run.draft([features[:slots]], [torch.tensor(PROMPT[1:])], DEPTH, chunk=4)
    text = PROMPT + served.drafts[: DEPTH - 1]
    trained = guessed(student, teacher, text, slots - 1)
    torch.testing.assert_close(trained, served.logits, atol=2e-3, rtol=1e-3)


def test_a_head_with_further_layers_begins_as_one_without(target: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    teacher = Teacher(str(target), CPU, chosen_layers(NUM_LAYERS))
    sizes = Eagle3Sizes(draft_vocab=25, unroll=DEPTH)
    before = Eagle3Student(sizes, teacher, CONTEXT, COUNTS)
    before.save(tmp_path)
    before.begin_from(tmp_path)  # as it is saved
    after = Eagle3Student(replace(sizes, layers=3), teacher, CONTEXT, COUNTS)
    after.begin_from(tmp_path)
    place = len(PROMPT) - 1
    known = guessed(before, teacher, PROMPT, place)
    torch.testing.assert_close(guessed(after, teacher, PROMPT, place), known)
    after.save(tmp_path)
    with pytest.raises(ConfigError, match="layers"):
        before.begin_from(tmp_path)


def test_a_draft_is_an_ordinary_llama(target: Path, tmp_path: Path) -> None:
    student, teacher = make("draft", target)
    student.save(tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    found = guessed(student, teacher, PROMPT, len(PROMPT) - 1)[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    random_model("llama", 4, tie_word_embeddings=True, num_hidden_layers=3).save_pretrained(folder)
    return folder


def test_a_draft_of_all_layers_of_its_target_guesses_what_the_target_says(
    tied_target: Path, tmp_path: Path
) -> None:
    teacher = Teacher(str(tied_target), CPU)
    sizes = DraftSizes(target_layers=(0, 1, 2))
    student = make_student(sizes, teacher, cast("Any", None), TrainSettings(context=CONTEXT), "toy")
    batch = make_batch([[TrainingRecord(np.array(PROMPT), 1, 0)]], CONTEXT, 1.0)
    hidden = student.draft_outputs(batch, teacher.states(batch)).states[0]
    torch.testing.assert_close(hidden, teacher.states(batch).hidden, atol=1e-5, rtol=1e-5)
    student.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    spec = teacher.spec
    assert config["num_key_value_heads"] == spec.num_kv_heads < config["num_attention_heads"]
    assert config["intermediate_size"] == spec.intermediate_size


def test_a_draft_has_the_layers_named_in_their_order(tied_target: Path) -> None:
    teacher = Teacher(str(tied_target), CPU)
    student = DraftStudent(DraftSizes(target_layers=(2, 0)), teacher, CONTEXT)
    mine, theirs = student.tensors(), teacher.trunk([0, 2])
    for own, other in ((0, 1), (1, 0)):
        part = "mlp.up_proj.weight"
        assert torch.equal(mine[f"model.layers.{own}.{part}"], theirs[f"layers.{other}.{part}"])


def test_layers_that_a_draft_cannot_begin_as_are_refused(target: Path, tied_target: Path) -> None:
    sizes = DraftSizes(target_layers=(0, 3))
    with pytest.raises(ConfigError, match="has 3, and the target's layers are 0 to 2"):
        check_fits(sizes, load_spec(str(tied_target)))
    with pytest.raises(ConfigError, match="this llama model differs in tied; give the draft's"):
        check_fits(sizes, load_spec(str(target)))


def test_offsets_lead_from_drafted_ids_to_the_targets(target: Path, tmp_path: Path) -> None:
    student, _ = make("eagle3", target)
    tensors = student.tensors()
    ids = torch.arange(25) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    student.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == 25 and config["vocab_size"] == VOCAB_SIZE


def test_the_most_frequent_tokens_are_drafted_and_those_that_end_a_text_always() -> None:
    counts = np.array([5, 0, 9, 9, 1, 7])
    assert draft_tokens(counts, 3, ()).tolist() == [2, 3, 5]
    assert draft_tokens(counts, 3, (1,)).tolist() == [1, 2, 3]


def test_the_layers_read_are_the_usual_ones_where_there_are_enough() -> None:
    assert chosen_layers(30) == feature_layers(30) == (2, 15, 27)
    assert chosen_layers(4) == (1, 2, 3)
    with pytest.raises(ConfigError, match="the target has 1 layer"):
        chosen_layers(1)


def test_principal_components_keep_the_geometry_of_an_embedding_that_has_so_few() -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(50, 4, generator=generator) @ torch.randn(4, 16, generator=generator)
    parts = principal_components(embedding, 4)
    before, after = embedding @ embedding.T, parts @ parts.T
    torch.testing.assert_close(after / after.norm(), before / before.norm(), atol=1e-5, rtol=1e-3)
    assert principal_components(embedding, 20).shape == (50, 20)


@pytest.mark.parametrize("name", ["draft", "eagle3", "eagle3-whole", "medusa", "mlp", "mlp-tied"])
def test_a_student_may_begin_from_a_checkpoint(name: str, target: Path, tmp_path: Path) -> None:
    given, _ = make(name, target)
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.mul_(0.5)
    given.save(tmp_path)
    student, _ = make(name, target)
    student.begin_from(tmp_path)
    for tensor, wanted in zip(student.parameters(), given.parameters(), strict=True):
        assert torch.equal(tensor, wanted)


def test_a_checkpoint_of_other_sizes_is_nothing_to_begin_from(target: Path, tmp_path: Path) -> None:
    given, teacher = make("eagle3", target)
    given.save(tmp_path)
    other = Eagle3Student(Eagle3Sizes(draft_vocab=24), teacher, CONTEXT, COUNTS)
    with pytest.raises(ConfigError, match="does not match this student's; give the sizes"):
        other.begin_from(tmp_path)
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        other.begin_from(tmp_path / "nowhere")


def test_a_head_that_goes_on_with_other_texts_keeps_its_tokens(
    target: Path, tmp_path: Path
) -> None:
    given, teacher = make("eagle3", target)
    given.save(tmp_path)
    other = Eagle3Student(Eagle3Sizes(draft_vocab=25), teacher, CONTEXT, COUNTS[::-1])
    assert not torch.equal(other.tensors()["d2t"], given.tensors()["d2t"])
    other.begin_from(tmp_path)
    assert torch.equal(other.tensors()["d2t"], given.tensors()["d2t"])
    damaged = load_file(tmp_path / "model.safetensors")
    damaged["d2t"] += VOCAB_SIZE
    save_file(damaged, tmp_path / "model.safetensors")
    fresh = Eagle3Student(Eagle3Sizes(draft_vocab=25), teacher, CONTEXT, COUNTS)
    with pytest.raises(ConfigError, match="whose d2t does not match this student"):
        fresh.begin_from(tmp_path)


def test_a_wider_mlp_begins_as_what_the_narrower_one_computes(target: Path, tmp_path: Path) -> None:
    _, teacher = make("eagle3", target)
    given = Eagle3Student(Eagle3Sizes(intermediate=8), teacher, CONTEXT, COUNTS)
    given.save(tmp_path)
    given.begin_from(tmp_path)  # what bfloat16 keeps of it
    wider = Eagle3Student(Eagle3Sizes(intermediate=12), teacher, CONTEXT, COUNTS)
    wider.begin_from(tmp_path)
    x = torch.randn(3, given.midlayer.mlp.gate_proj.weight.shape[1])
    torch.testing.assert_close(wider.midlayer.mlp(x), given.midlayer.mlp(x))
    wider.save(tmp_path)
    with pytest.raises(ConfigError, match=r"mlp.* does not match this student"):
        given.begin_from(tmp_path)


def test_a_head_may_have_a_narrower_mlp_than_its_target(target: Path, tmp_path: Path) -> None:
    _, teacher = make("eagle3", target)
    student = Eagle3Student(Eagle3Sizes(intermediate=8), teacher, CONTEXT, COUNTS)
    student.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] == 8
    assert student.midlayer.mlp.gate_proj.weight.shape[0] == 8


def test_a_colder_teacher_is_learned_more_sharply(target: Path, tmp_path: Path) -> None:
    """From the same beginning, a step leads to likeliest tokens that are likelier."""

    def surest(temperature: float) -> float:
        student, teacher = make("draft", target)
        settings = TrainSettings(
            steps=30, batch_tokens=32, context=32, teacher_temperature=temperature, warmup=0
        )
        records = [TrainingRecord(np.array(PROMPT * 4), 1, 0)]
        Trainer(student, teacher, records, settings, tmp_path / str(temperature), {}).run(
            ProgressReporter(quiet=True)
        )
        batch = make_batch([records], 32, 1.0)
        [state] = student.draft_outputs(batch, teacher.states(batch)).states
        table = student.tensors()["model.embed_tokens.weight"]
        return float((state @ table.T).softmax(-1).amax(-1)[:20].mean().detach())

    assert surest(0.2) > surest(1.0) + 0.05
